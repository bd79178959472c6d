// Strips on AMX: a tile that is multiplied while the one before it is finished.
#pragma once

#include <utility>

#include "cpu/kernels/rows/epilogue.h"
#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/x86/amx_registers.h"
#include "cpu/kernels/x86/lines.h"

namespace qfx::cpu {
namespace {

// Register i begins a new tile: what the tile before left there is stored inside this one's first
// step, as a store waits for the last product of its own register only, and after the last step for
// all.
#define QFX_BEGIN(i, place)                                                       \
  if (before.sums != nullptr) _tile_stored(i, before.sums + (place), kSumStride); \
  if (sums != nullptr) {                                                          \
    _tile_loadd(i, sums + (place), kSumStride);                                   \
  } else {                                                                        \
    _tile_zero(i);                                                                \
  }

// How many calls of Lines::some to make with every 64 k but the first.
template <typename L>
inline int lines_at_once(int rows, int64_t steps) {
  const int calls = static_cast<int>(L::calls_for(rows)), rest = static_cast<int>(steps) - 1;
  return rest > 0 ? (calls + rest - 1) / rest : 0;
}

template <bool kTall, Passing kPassing, Activation A, Dtype D>
void strip_behind(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                  const int8_t* ahead, int64_t fetches, const int32_t* sums,
                  const Pending& before) {
  const int64_t steps = groups * kGroup / kDepth;
  QFX_LOAD(6, b, kStride, kPassing == Passing::kWeights)
  QFX_LOAD(4, a, lda, kPassing == Passing::kRows)
  QFX_BEGIN(0, 0)
  _tile_dpbssd(0, 4, 6);
  QFX_LOAD(7, b + kStride / 2, kStride, kPassing == Passing::kWeights)
  QFX_BEGIN(1, kHalf)
  _tile_dpbssd(1, 4, 7);
  if constexpr (kTall) {
    QFX_LOAD(5, a + kRowsAtMost * lda, lda, kPassing == Passing::kRows)
    QFX_BEGIN(2, kLower)
    _tile_dpbssd(2, 5, 6);
    QFX_BEGIN(3, kLower + kHalf)
    _tile_dpbssd(3, 5, 7);
  }
  asm volatile("" ::: "memory");  // GCC's tilestored does not claim to write memory
  Lines<A, D, 1, false> lines(before.then);
  const int64_t at_once = lines_at_once<Lines<A, D, 1, false>>(before.then[0].rows, steps);
  // (two loops, as a step has no register to spare)
  const int8_t* const end = b + (steps - 1) * kDepth * kPanel;
  const auto step = [&]() __attribute__((always_inline)) {
    a += kDepth;
    b += kDepth * kPanel;
    multiply_step<kTall, kPassing>(a, lda, b);
    for (int64_t i = 0; i < at_once && lines.left(); ++i) lines.some();
  };
  if (fetches == 0) {
    while (b != end) step();
  } else {
    while (b != end) {
      step();
      for (int64_t i = 0; i < fetches; ++i, ahead += 64) fetch<kT1>(ahead);
    }
  }
  while (lines.left()) lines.some();
}

template <Passing kPassing, Activation A, Dtype D>
void strip_of(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
              const int8_t* ahead, int64_t fetches, const int32_t* sums, const Pending& before) {
  configure_tile(rows);  // the rows of the tile before, if there is one
  const auto run =
      rows > kRowsAtMost ? strip_behind<true, kPassing, A, D> : strip_behind<false, kPassing, A, D>;
  run(a, lda, b, groups, ahead, fetches, sums, before);
}

inline void fetch_step_with(int hint, const int8_t* ahead) {
  switch (hint) {
    case kT0:
      return fetch_step<kT0>(ahead);
    case kT1:
      return fetch_step<kT1>(ahead);
    case kNta:
      return fetch_step<kNta>(ahead);
  }
}

template <Activation A, Dtype D>
void strip_pair(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                int64_t groups, int64_t ahead, int hint, const Pending& before) {
  configure_pair(rows);
  const int64_t steps = groups * kGroup / kDepth, right = rows * kPanel;
  const int32_t* const sums = nullptr;
  _tile_loadd(4, a, lda);
  _tile_stream_loadd(5, b, kStride);
  QFX_BEGIN(0, 0)
  _tile_dpbssd(0, 4, 5);
  _tile_stream_loadd(6, b + kStride / 2, kStride);
  QFX_BEGIN(1, kHalf)
  _tile_dpbssd(1, 4, 6);
  _tile_stream_loadd(7, b + apart, kStride);
  QFX_BEGIN(2, right)
  _tile_dpbssd(2, 4, 7);
  _tile_stream_loadd(5, b + apart + kStride / 2, kStride);
  QFX_BEGIN(3, right + kHalf)
  _tile_dpbssd(3, 4, 5);
  asm volatile("" ::: "memory");
  Lines<A, D, 2, false> lines(before.then);
  const int rows_before = before.then[0].rows + before.then[1].rows;
  const int64_t at_once = lines_at_once<Lines<A, D, 2, false>>(rows_before, steps);
  for (int64_t s = 1; s < steps; ++s) {
    a += kDepth;
    b += kDepth * kPanel;
    fetch_step_with(hint, b + ahead);
    fetch_step_with(hint, b + apart + ahead);
    multiply_pair_step(a, lda, b, apart);
    for (int64_t i = 0; i < at_once && lines.left(); ++i) lines.some();
  }
  while (lines.left()) lines.some();
}

void finish_strip(const Pending& last) {
  const int lower = configured < 0 ? -configured * kPanel : kLower;
  _tile_stored(0, last.sums, kSumStride);
  _tile_stored(1, last.sums + kHalf, kSumStride);
  if (configured < 0 || configured > kRowsAtMost) {
    _tile_stored(2, last.sums + lower, kSumStride);
    _tile_stored(3, last.sums + lower + kHalf, kSumStride);
  }
  asm volatile("" ::: "memory");
  for (const EpilogueArgs& then : last.then) {
    if (then.rows > 0) epilogue(&then);
  }
}

template <Passing kPassing>
struct StripsOf {
  StripFn of[kOutputs];
  template <int... i>
  constexpr explicit StripsOf(std::integer_sequence<int, i...>)
      : of{strip_of<kPassing, Activation(i / kDtypes), Dtype(i % kDtypes)>...} {}
};

struct StripPairs {
  StripPairFn of[kOutputs];
  template <int... i>
  constexpr explicit StripPairs(std::integer_sequence<int, i...>)
      : of{strip_pair<Activation(i / kDtypes), Dtype(i % kDtypes)>...} {}
};

constexpr auto kEachOutput = std::make_integer_sequence<int, kOutputs>();
constexpr StripsOf<Passing::kRows> kRowsPass(kEachOutput);
constexpr StripsOf<Passing::kWeights> kWeightsPass(kEachOutput);
constexpr StripPairs kStripPairs(kEachOutput);

constexpr Strips kStrips = {kRowsAtMost,     2 * kDepth,     kRowsPass.of,
                            kWeightsPass.of, kStripPairs.of, finish_strip};

}  // namespace
}  // namespace qfx::cpu
