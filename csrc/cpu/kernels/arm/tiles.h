// Tiles of 128-bit registers, for the instruction sets that differ in the product only. A vector of
// weights holds 4 columns of one group. Product::Codes holds one row's codes of Product::kDepth
// groups, Product::Sum the sums of 4 columns, and add(sum, w, codes, g) returns sum plus the
// products of group g with w. kSums is how many of those leave room for the other registers.
#pragma once

#include <arm_neon.h>

#include <array>
#include <utility>

#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// kRows x (4 * kVectors) columns of one panel; every loop over the sums is unrolled.
template <class Product, int kRows, int kVectors, bool kPrefetch>
inline void strip(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                  const int8_t* ahead, int32_t* out, bool accumulate) {
  typename Product::Sum sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int32_t* c = out + r * kPanel + 4 * v;
      sums[r][v] = Product::from(accumulate ? vld1q_s32(c) : vdupq_n_s32(0));
    }
  }
  for (int64_t i = 0; i < groups; i += Product::kDepth) {
    typename Product::Codes codes[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) codes[r] = Product::codes(a + r * lda);
    a += Product::kDepth * kGroup;
#pragma GCC unroll 4
    for (int g = 0; g < Product::kDepth; ++g, b += kPanel * kGroup) {
      if constexpr (kPrefetch) {
        for (int line = 0; line < 16 * kVectors; line += 64) __builtin_prefetch(ahead + line);
        ahead += 16 * kVectors;
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int8x16_t w = vld1q_s8(b + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][v] = Product::add(sums[r][v], w, codes[r], g);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      vst1q_s32(out + r * kPanel + 4 * v, Product::total(sums[r][v]));
    }
  }
}

// A cache line of weights holds 16 columns: taller tiles take those at a time.
template <class Product, int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr int kVectors = kRows * 8 <= Product::kSums ? 8 : 4;
  strip<Product, kRows, kVectors, kPrefetch>(a, lda, b, groups, ahead, out, accumulate);
  if constexpr (kVectors == 4) {
    ahead += groups * kGroup * kPanel / 2;
    strip<Product, kRows, kVectors, kPrefetch>(a, lda, b + 64, groups, ahead, out + 16, accumulate);
  }
}

// Tiles of 1 to kTallest rows.
template <class Product>
inline constexpr int kTallest = Product::kSums / 4;

template <class Product, bool kPrefetch, int... kLess>
constexpr std::array<TileFn, sizeof...(kLess)> tiles_of(std::integer_sequence<int, kLess...>) {
  return {tile<Product, kLess + 1, kPrefetch>...};
}

template <class Product, bool kPrefetch>
constexpr auto kTiles =
    tiles_of<Product, kPrefetch>(std::make_integer_sequence<int, kTallest<Product>>());

}  // namespace
}  // namespace qfx::cpu
