// Tiles of AMX whose sums become floats group by group (E3). Sums have to leave the tile registers
// after each group; those of a few are added up together.
#pragma once

#include "cpu/kernels/x86/amx_registers.h"
#include "cpu/kernels/x86/group_terms512.h"

namespace qfx::cpu {
namespace {

constexpr int kGroupsAtOnce = 4;  // whose raw sums stay in the first cache
constexpr int kRawSums = kTallest * kPanel;

// Adds the raw sums [kGroups][32][32] of `rows` rows; terms are of the first group.
template <int kGroups, bool kPairs>
void add_lines(const int32_t* raw, int rows, const GroupTerms& t, GroupColumns columns) {
  __m512 scale[kGroups][2];
  __m512i pairs[kGroups][2];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g, columns.next()) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const int n = kHalf * h;
      scale[g][h] = _mm512_loadu_ps(columns.scale + n);
      if constexpr (kPairs) pairs[g][h] = negated_pairs(columns.colsum + n, columns.zero + n);
    }
  }
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const int at = r * kPanel + kHalf * h;
      __m512 sum = _mm512_loadu_ps(t.sums + at);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const int64_t row = g * t.row_step + r;
        __m512i exact = _mm512_load_si512(raw + g * kRawSums + at);
        if constexpr (kPairs) {
          exact = _mm512_dpwssd_epi32(exact, _mm512_set1_epi32(t.row_pair[row]), pairs[g][h]);
        }
        sum = scaled_and_added(exact, scale[g][h], _mm512_set1_ps(t.row_scale[row]), sum);
      }
      _mm512_storeu_ps(t.sums + at, sum);
    }
  }
}

using AddFn = void (*)(const int32_t*, int, const GroupTerms&, GroupColumns);
template <bool kPairs>
constexpr AddFn kAddLines[kGroupsAtOnce] = {add_lines<1, kPairs>, add_lines<2, kPairs>,
                                            add_lines<3, kPairs>, add_lines<4, kPairs>};

template <bool kTall, Passing kPassing, int kHint>
inline __attribute__((always_inline)) void multiply_group(const GroupTile& t, int64_t k) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) _tile_zero(2);
  if constexpr (kTall) _tile_zero(3);
  for (int64_t end = k + t.depth; k < end; k += kDepth) {
    fetch_step<kHint>(t.ahead + k * kPanel);
    multiply_step<kTall, kPassing>(t.a + k, t.lda, t.b + k * kPanel);
  }
}

template <bool kTall, Passing kPassing, int kHint, bool kPairs>
void group_tile(const GroupTile& t) {
  configure_tile(t.rows);
  alignas(64) int32_t raw[kGroupsAtOnce][kRawSums];
  GroupTerms terms = t.terms;
  GroupColumns columns(terms);
  for (int64_t g = 0; g < t.groups; g += kGroupsAtOnce) {
    const int64_t left = t.groups - g;
    const int count = static_cast<int>(left < kGroupsAtOnce ? left : kGroupsAtOnce);
    for (int i = 0; i < count; ++i) {
      multiply_group<kTall, kPassing, kHint>(t, (g + i) * t.depth);
      store_sums<kTall>(raw[i]);
    }
    kAddLines<kPairs>[count - 1](raw[0], t.rows, terms, columns);
    for (int i = 0; i < count; ++i) columns.next();
    if constexpr (kPairs) terms.row_pair += kGroupsAtOnce * terms.row_step;
    terms.row_scale += kGroupsAtOnce * terms.row_step;
  }
}

// The same functions for all heights up to that of a tile register, and for all above.
template <Passing kPassing, int kHint, bool kPairs>
struct GroupFns {
  GroupTileFn tiles[kTallest];
  constexpr GroupFns() : tiles{} {
    for (int rows = 1; rows <= kTallest; ++rows) {
      tiles[rows - 1] = rows > kRowsAtMost ? group_tile<true, kPassing, kHint, kPairs>
                                           : group_tile<false, kPassing, kHint, kPairs>;
    }
  }
};

template <Passing kPassing, int kHint, bool kPairs>
constexpr GroupFns<kPassing, kHint, kPairs> kGroupFns;

template <int kHint, bool kPairs>
constexpr const GroupTileFn* kFewInGroups = kGroupFns<Passing::kWeights, kHint, kPairs>.tiles;

constexpr GroupTiles kGroups = {
    .tiles = {kGroupFns<Passing::kRows, kNothing, false>.tiles,
              kGroupFns<Passing::kRows, kNothing, true>.tiles},
    .prefetching = {kGroupFns<Passing::kRows, kT1, false>.tiles,
                    kGroupFns<Passing::kRows, kT1, true>.tiles},
    .few = {{kFewInGroups<kT0, false>, kFewInGroups<kT1, false>, kFewInGroups<kNta, false>},
            {kFewInGroups<kT0, true>, kFewInGroups<kT1, true>, kFewInGroups<kNta, true>}}};

}  // namespace
}  // namespace qfx::cpu
