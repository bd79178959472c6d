// Tables of tiles for codes of 4 and 5 bits, and the operand format of their rows.
#pragma once

#include <array>
#include <utility>

#include "cpu/kernels/rows/lowbit.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/tables/lowbit.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int64_t kScaleBytes = kPanel * sizeof(uint16_t);  // of a group
constexpr int kLowbitRows = 8;                              // of the tallest tile

// Reads all of them at once, in front of the groups: one by one between these they would be a
// second stream, beside which the first came half as fast on a Zen 4. There prefetching them did
// not serve 64 groups, of which there are 32 lines.
inline __attribute__((always_inline)) void touch_zeros(const LowbitTile& t) {
  if (t.zero == nullptr) return;
  for (int64_t i = 0; i < t.groups * kPanel; i += 64) asm volatile("" ::"r"(t.zero[i]));
}

// f of the tile of each panel.
template <int kRows, typename F>
inline __attribute__((always_inline)) void for_each_panel_of(const LowbitTile& t, const F& f) {
  LowbitTile here = t;
  for (int64_t p = 0; p < t.panels; ++p) {
    f(here);
    here.b += t.next;
    if (t.zero != nullptr) here.zero += t.next;
    here.sums += kRows * kPanel;
  }
}

// Tiles::tile<bits, rows, hint> of every kind.
template <class Tiles, int kBits, int kHint, int... kLess>
constexpr std::array<LowbitTileFn, sizeof...(kLess)> lowbit_tiles_of(
    std::integer_sequence<int, kLess...>) {
  return {Tiles::template tile<kBits, kLess + 1, kHint>...};
}

template <class Tiles, int kBits, int kHint>
constexpr auto kLowbitTiles =
    lowbit_tiles_of<Tiles, kBits, kHint>(std::make_integer_sequence<int, kLowbitRows>());

template <class Tiles, int kBits>
constexpr const LowbitTileFn* kFewLowbit[kHints] = {kLowbitTiles<Tiles, kBits, kT0>.data(),
                                                    kLowbitTiles<Tiles, kBits, kT1>.data(),
                                                    kLowbitTiles<Tiles, kBits, kNta>.data()};

constexpr Format kLowbitFormat = {
    .name = "lowbit",
    .tile_rows = kLowbitRows,
    .bytes_per_code = 1,
    .k_multiple = 32,
    .mul_offset = 0,
    .tiles = nullptr,
    .prefetching_tiles = nullptr,
    .arrange = arrange_offset<0>,
    .few = {.rows = kLowbitRows},
    .tuning = {.stream_rows = kLowbitRows, .hint = kT1, .ahead = 4096}};

template <class Tiles>
constexpr LowbitKernels lowbit_kernels(UnpackGroupFn four, UnpackGroupFn five) {
  const auto& low = kFewLowbit<Tiles, 4>;
  const auto& high = kFewLowbit<Tiles, 5>;
  return {.unpack = {four, five},
          .add_scaled = add_scaled,
          .narrow = store_row,
          .rows = &kLowbitFormat,
          .few = {{low[kT0], low[kT1], low[kNta]}, {high[kT0], high[kT1], high[kNta]}}};
}

}  // namespace
}  // namespace qfx::cpu
