// Strips on AMX: a tile that is multiplied while the one before it is finished.
#pragma once

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/x86/amx_registers.h"
#include "cpu/kernels/x86/lines.h"

namespace qfx::cpu {
namespace {

// Register i begins anew: what the tile before left there is stored inside this one's first step,
// as a store waits for the last product of its own register only, and behind the last step for all.
#define QFX_BEGIN(i, place)                                                       \
  if (before.sums != nullptr) _tile_stored(i, before.sums + (place), kSumStride); \
  if (sums != nullptr) {                                                          \
    _tile_loadd(i, sums + (place), kSumStride);                                   \
  } else {                                                                        \
    _tile_zero(i);                                                                \
  }

template <bool kTall, Passing kPassing, Activation A>
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
  Lines<A> lines(before.then);
  const int64_t at_once = (before.then.rows + steps - 2) / (steps > 1 ? steps - 1 : 1);
  for (int64_t s = 1; s < steps; ++s) {
    a += kDepth;
    b += kDepth * kPanel;
    multiply_step<kTall, kPassing>(a, lda, b);
    for (int64_t i = 0; i < at_once && lines.left() > 0; ++i) lines.line();
    for (int64_t i = 0; i < fetches; ++i, ahead += 64) fetch<kT1>(ahead);
  }
  while (lines.left() > 0) lines.line();
}

template <Passing kPassing, Activation A>
void strip_of(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
              const int8_t* ahead, int64_t fetches, const int32_t* sums, const Pending& before) {
  configure_tile(rows);  // the rows of the tile before, if there is one
  const auto run =
      rows > kRowsAtMost ? strip_behind<true, kPassing, A> : strip_behind<false, kPassing, A>;
  run(a, lda, b, groups, ahead, fetches, sums, before);
}

void finish_strip(const Pending& last) {
  _tile_stored(0, last.sums, kSumStride);
  _tile_stored(1, last.sums + kHalf, kSumStride);
  if (configured > kRowsAtMost) {
    _tile_stored(2, last.sums + kLower, kSumStride);
    _tile_stored(3, last.sums + kLower + kHalf, kSumStride);
  }
  asm volatile("" ::: "memory");
  if (last.then.rows > 0) epilogue(&last.then);
}

template <Passing kPassing>
constexpr StripFn kStripOf[] = {
    strip_of<kPassing, Activation::kNone>, strip_of<kPassing, Activation::kRelu>,
    strip_of<kPassing, Activation::kGelu>, strip_of<kPassing, Activation::kGeluTanh>,
    strip_of<kPassing, Activation::kSilu>};

constexpr Strips kStrips = {kRowsAtMost, 2 * kDepth, kStripOf<Passing::kRows>,
                            kStripOf<Passing::kWeights>, finish_strip};

}  // namespace
}  // namespace qfx::cpu
