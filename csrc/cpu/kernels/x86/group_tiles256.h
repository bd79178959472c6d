// Tiles of 256-bit registers whose sums become floats group by group (E3); see tiles256.h.
#pragma once

#include "cpu/kernels/x86/group_columns.h"
#include "cpu/kernels/x86/tiles256.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline __m256i load(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Of 8 columns -colsum and, 16 bits higher, -zero.
inline __m256i negated_pairs(const int32_t* colsum, const int32_t* zero) {
  const __m256i zeros = _mm256_slli_epi32(load(zero), 16);
  const __m256i both = _mm256_blend_epi16(load(colsum), zeros, 0xaa);
  return _mm256_sub_epi16(_mm256_setzero_si256(), both);
}

// What the sums of one row and 8 columns start from.
template <class Operand, bool kPairs>
inline __m256i offsets(const GroupTile& t, const GroupColumns& columns, int64_t at, int n) {
  constexpr bool kAdds = Operand::kBytes > 1;  // only such an arranged row has something to add
  const __m256i add = kAdds ? _mm256_set1_epi32(t.terms.row_add[at]) : _mm256_setzero_si256();
  if constexpr (kPairs) {
    const __m256i pair = _mm256_set1_epi32(t.terms.row_pair[at]);
    const __m256i both =
        _mm256_madd_epi16(pair, negated_pairs(columns.colsum + n, columns.zero + n));
    return _mm256_add_epi32(both, add);
  } else if constexpr (kAdds) {
    return add;  // mul is 0
  } else {
    return _mm256_mullo_epi32(load(columns.colsum + n), _mm256_set1_epi32(-t.mul));
  }
}

// kRows x (8 * kVectors) columns, from column `first` on.
template <class Operand, int kRows, int kVectors, int kHint, bool kPairs>
inline void group_strip(const GroupTile& t, int first, const int8_t* ahead) {
  constexpr int kStep = Operand::kDepth * kPanel * kGroup;
  const uint8_t* a = t.a;
  const int8_t* b = t.b + first * kGroup;
  float* sums = t.terms.sums + first;
  GroupColumns columns(t.terms);
  for (int64_t g = 0, at = 0; g < t.groups; ++g, at += t.terms.row_step, columns.next()) {
    __m256i acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = offsets<Operand, kPairs>(t, columns, at + r, first + 8 * v);
      }
    }
    for (int64_t k = 0; k < t.depth; k += Operand::kDepth * kGroup) {
      if constexpr (kHint != kNothing) {
#pragma GCC unroll 4
        for (int i = 0; i < kStep / 4 * kVectors; i += 64) fetch<kHint>(ahead + i);
        ahead += kStep / 4 * kVectors;
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand row(a + r * t.lda);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = row.add(acc[r][v], b + v * 32);
      }
      a += Operand::kDepth * kGroup * Operand::kBytes;
      b += kStep;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) asm("" : "+x"(acc[r][v]));  // GCC 12 would copy them all
    }
    asm("" : "+r"(sums));  // or GCC keeps them on the stack from group to group
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 row_scale = _mm256_set1_ps(t.terms.row_scale[at + r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256 scale =
            _mm256_mul_ps(row_scale, _mm256_loadu_ps(columns.scale + first + 8 * v));
        float* to = sums + r * kPanel + 8 * v;
        const __m256 sum =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][v]), scale, _mm256_loadu_ps(to));
        _mm256_storeu_ps(to, sum);
      }
    }
  }
}

template <class Operand, int kRows, int kHint, bool kPairs>
void group_tile(const GroupTile& t) {
  constexpr int kVectors = kRows * 4 <= Operand::kAccumulators ? 4 : 2;
  group_strip<Operand, kRows, kVectors, kHint, kPairs>(t, 0, t.ahead);
  if constexpr (kVectors == 2) {
    const int8_t* ahead = t.ahead + t.groups * t.depth * kPanel / 2;
    group_strip<Operand, kRows, kVectors, kHint, kPairs>(t, 16, ahead);
  }
}

template <class Operand, int kHint, bool kPairs, int... kLess>
constexpr std::array<GroupTileFn, sizeof...(kLess)> group_tiles_of(
    std::integer_sequence<int, kLess...>) {
  return {group_tile<Operand, kLess + 1, kHint, kPairs>...};
}

template <class Operand, bool kPairs, int kHint, int kRows = kTallest<Operand>>
constexpr auto kInGroups =
    group_tiles_of<Operand, kHint, kPairs>(std::make_integer_sequence<int, kRows>());

template <class Operand, bool kPairs, int kHint, int kRows = kTallest<Operand>>
constexpr const GroupTileFn* kGroupTiles = kInGroups<Operand, kPairs, kHint, kRows>.data();

template <class Operand>
constexpr GroupTiles kGroups = {
    .tiles = {kGroupTiles<Operand, false, kNothing>, kGroupTiles<Operand, true, kNothing>},
    .prefetching = {kGroupTiles<Operand, false, kT0>, kGroupTiles<Operand, true, kT0>},
    .few = {{kGroupTiles<Operand, false, kT0>, kGroupTiles<Operand, false, kT1, kFew>,
             kGroupTiles<Operand, false, kNta, kFew>},
            {kGroupTiles<Operand, true, kT0>, kGroupTiles<Operand, true, kT1, kFew>,
             kGroupTiles<Operand, true, kNta, kFew>}}};

}  // namespace
}  // namespace qfx::cpu
