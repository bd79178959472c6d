// Tiles of 256-bit registers, for the instruction sets that differ in the product only.
// Operand(a) holds one row's codes of Operand::kDepth groups, and add(acc, w) returns acc plus
// their products with 8 columns of each of those groups at w. kBytes is the size of an arranged
// code, kAccumulators how many accumulators leave room for the operand's registers.
#pragma once

#include <immintrin.h>

#include <array>
#include <utility>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline __m256i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

inline __m256i load(const int8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// kRows x (8 * kVectors) columns of one panel; every loop over the accumulators is unrolled, or GCC
// spills them.
template <class Operand, int kRows, int kVectors, int kHint>
inline void strip(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                  const int8_t* ahead, int32_t* out, bool accumulate) {
  constexpr int kStep = Operand::kDepth * kPanel * kGroup;
  __m256i acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m256i* c = reinterpret_cast<const __m256i*>(out + r * kPanel) + v;
      acc[r][v] = accumulate ? _mm256_loadu_si256(c) : _mm256_setzero_si256();
    }
  }
  for (int64_t g = 0; g < groups; g += Operand::kDepth) {
    if constexpr (kHint != kNothing) {
#pragma GCC unroll 4
      for (int i = 0; i < kStep / 4 * kVectors; i += 64) fetch<kHint>(ahead + i);
      ahead += kStep / 4 * kVectors;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Operand row(a + r * lda);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = row.add(acc[r][v], b + v * 32);
      }
    }
    a += Operand::kDepth * kGroup * Operand::kBytes;
    b += kStep;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * kPanel) + v, acc[r][v]);
    }
  }
}

// A cache line of weights holds 16 columns: taller tiles take those at a time, and read each line
// once for all their rows.
template <class Operand, int kRows, int kHint>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr int kVectors = kRows * 4 <= Operand::kAccumulators ? 4 : 2;
  strip<Operand, kRows, kVectors, kHint>(a, lda, b, groups, ahead, out, accumulate);
  if constexpr (kVectors == 2) {
    ahead += groups * kGroup * kPanel / 2;
    strip<Operand, kRows, kVectors, kHint>(a, lda, b + 64, groups, ahead, out + 16, accumulate);
  }
}

template <class Operand, int kRows>
void narrow_tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t*,
                 int32_t* out, bool accumulate) {
  strip<Operand, kRows, 2, kNothing>(a, lda, b, groups, b, out, accumulate);
  for (int r = 0; r < kRows && !accumulate; ++r) {
    __builtin_memset(out + r * kPanel + kPanel / 2, 0, kPanel / 2 * sizeof(int32_t));
  }
}

// Tiles of 1 to kTallest rows.
template <class Operand>
inline constexpr int kTallest = Operand::kAccumulators / 2;
constexpr int kFew = 2;

template <class Operand, int kHint, int... kLess>
constexpr std::array<TileFn, sizeof...(kLess)> tiles_of(std::integer_sequence<int, kLess...>) {
  return {tile<Operand, kLess + 1, kHint>...};
}

template <class Operand, int kHint, int kRows = kTallest<Operand>>
constexpr auto kTiles = tiles_of<Operand, kHint>(std::make_integer_sequence<int, kRows>());

template <class Operand, int... kLess>
constexpr std::array<TileFn, sizeof...(kLess)> narrow_tiles_of(
    std::integer_sequence<int, kLess...>) {
  return {narrow_tile<Operand, kLess + 1>...};
}

template <class Operand>
constexpr auto kNarrowTiles =
    narrow_tiles_of<Operand>(std::make_integer_sequence<int, kTallest<Operand>>());

template <class Operand>
constexpr ByHint<TileFn> few_tiles() {
  return {kFew,
          {kTiles<Operand, kT0>.data(), kTiles<Operand, kT1, kFew>.data(),
           kTiles<Operand, kNta, kFew>.data()}};
}

}  // namespace
}  // namespace qfx::cpu
