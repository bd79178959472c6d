// Tiles of AVX-512 VNNI whose sums become floats group by group. (E3)
#pragma once

#include <array>
#include <utility>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/row_pointers.h"
#include "cpu/kernels/x86/group_terms512.h"

namespace qfx::cpu {
namespace {

inline __m512i word_at(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// kRows x 32 columns. The sums of a group start from what its offsets make of them, so that they
// cost nothing. See `strip` of avx512vnni.cpp for the steps.
template <int kRows, int kHint, bool kPairs>
void group_tile(const GroupTile& t) {
  constexpr int kSteps = kRows <= 2 ? 4 : kRows <= 5 ? 2 : 1;
  const int8_t *b = t.b, *ahead = t.ahead;
  const int32_t* pair = t.terms.row_pair;
  const float* row_scale = t.terms.row_scale;
  float* sums = t.terms.sums;
  GroupColumns columns(t.terms);
  RowPointers<uint8_t, kRows> rows(t.a, t.lda);
  for (int64_t g = 0; g < t.groups; ++g, columns.next(), row_scale += t.terms.row_step) {
    __m512i acc[kSteps][kRows][2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i start = kPairs ? negated_pairs(columns.colsum + 16 * h, columns.zero + 16 * h)
                                   : negated_products(columns.colsum + 16 * h, t.mul);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const __m512i none = _mm512_setzero_si512();
        if constexpr (kPairs) {
          acc[0][r][h] = _mm512_dpwssd_epi32(none, _mm512_set1_epi32(pair[r]), start);
        } else {
          acc[0][r][h] = start;
        }
#pragma GCC unroll 4
        for (int s = 1; s < kSteps; ++s) acc[s][r][h] = none;
      }
    }
    if constexpr (kPairs) pair += t.terms.row_step;
    for (int64_t k = 0; k < t.depth; k += kSteps * kGroup) {
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        fetch<kHint>(ahead);
        fetch<kHint>(ahead + 64);
        const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const __m512i x = word_at(rows.of(r));
          acc[s][r][0] = _mm512_dpbusd_epi32(acc[s][r][0], x, w0);
          acc[s][r][1] = _mm512_dpbusd_epi32(acc[s][r][1], x, w1);
        }
        rows.move(kGroup);
        b += kPanel * kGroup;
        if constexpr (kHint != kNothing) ahead += kPanel * kGroup;
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {  // GCC 12 would copy them all in each step
        asm("" : "+v"(acc[s][r][0]), "+v"(acc[s][r][1]));
      }
    }
    asm("" : "+r"(sums));  // nor keep them on the stack from group to group
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512 scale = _mm512_loadu_ps(columns.scale + 16 * h);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int s = 1; s < kSteps; ++s) {
          acc[0][r][h] = _mm512_add_epi32(acc[0][r][h], acc[s][r][h]);
        }
        float* to = sums + r * kPanel + 16 * h;
        _mm512_storeu_ps(to, scaled_and_added(acc[0][r][h], scale, _mm512_set1_ps(row_scale[r]),
                                              _mm512_loadu_ps(to)));
      }
    }
  }
}

template <int kHint, bool kPairs, int... kLess>
constexpr std::array<GroupTileFn, sizeof...(kLess)> group_tiles_of(
    std::integer_sequence<int, kLess...>) {
  return {group_tile<kLess + 1, kHint, kPairs>...};
}

template <int kHint, bool kPairs, int kRows>
constexpr auto kGroupTiles =
    group_tiles_of<kHint, kPairs>(std::make_integer_sequence<int, kRows>());

}  // namespace
}  // namespace qfx::cpu
