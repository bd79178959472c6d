// The tile registers of AMX: their shapes, which are state of the thread, and how they are loaded.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/panel.h"

namespace qfx::cpu {
namespace {

constexpr int kRowsAtMost = 16;               // of one tile register
constexpr int kTallest = 2 * kRowsAtMost;     // rows of a tile
constexpr int kDepth = 64;                    // codes of one row in it
constexpr int64_t kStride = kPanel * kGroup;  // bytes from one group of weights to the next
constexpr int64_t kSumStride = kPanel * 4;    // and from one row of sums to the next
constexpr int kHalf = kPanel / 2;             // columns of one tile register
constexpr int kLower = kRowsAtMost * kPanel;  // from the sums of the upper rows to the lower ones

// What ldtilecfg reads.
struct alignas(64) Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

thread_local int configured = 0;  // rows, those of a pair negative; 0: released

void configure(int name, const int (&height)[8]) {
  Shapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(height[i]);
    shapes.row_bytes[i] = height[i] == 0 ? 0 : kDepth;
  }
  asm volatile("" ::"r"(&shapes) : "memory");  // GCC's ldtilecfg claims to read 8 bytes only
  _tile_loadconfig(&shapes);
  configured = name;
}

// Registers 0, 1: sums of the upper rows, left and right columns; 2, 3: of the lower rows; 4, 5:
// activations of the upper and lower rows; 6, 7: weights of the left and right columns.
void configure_tile(int rows) {
  if (configured == rows) return;
  const int upper = rows < kRowsAtMost ? rows : kRowsAtMost, lower = rows - upper;
  configure(rows, {upper, upper, lower, lower, upper, lower, kRowsAtMost, kRowsAtMost});
}

// Registers 0 to 3: sums of 64 columns; 4: activations; 5, 6, 7: weights, in turn.
void configure_pair(int rows) {
  if (configured == -rows) return;
  configure(-rows, {rows, rows, rows, rows, rows, kRowsAtMost, kRowsAtMost, kRowsAtMost});
}

// What went past the caches is there before another thread reads it.
void release() {
  _tile_release();
  configured = 0;
  _mm_sfence();
}

// One operand stays in the first cache from tile to tile, the other is streamed and is left in the
// second one: else neither of them stays.
enum class Passing { kRows, kWeights };

// (a macro, as the register is an immediate operand)
#define QFX_LOAD(tile, from, stride, passes) \
  if constexpr (passes) {                    \
    _tile_stream_loadd(tile, from, stride);  \
  } else {                                   \
    _tile_loadd(tile, from, stride);         \
  }

// 64 k of a tile. One load stands between two products: with all loads first the products wait.
template <bool kTall, Passing kPassing>
inline __attribute__((always_inline)) void multiply_step(const uint8_t* a, int64_t lda,
                                                         const int8_t* b) {
  QFX_LOAD(6, b, kStride, kPassing == Passing::kWeights)
  QFX_LOAD(4, a, lda, kPassing == Passing::kRows)
  _tile_dpbssd(0, 4, 6);
  QFX_LOAD(7, b + kStride / 2, kStride, kPassing == Passing::kWeights)
  _tile_dpbssd(1, 4, 7);
  if constexpr (kTall) {
    QFX_LOAD(5, a + kRowsAtMost * lda, lda, kPassing == Passing::kRows)
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// 64 k of a pair.
inline __attribute__((always_inline)) void multiply_pair_step(const uint8_t* a, int64_t lda,
                                                              const int8_t* b, int64_t apart) {
  _tile_loadd(4, a, lda);
  _tile_stream_loadd(5, b, kStride);
  _tile_dpbssd(0, 4, 5);
  _tile_stream_loadd(6, b + kStride / 2, kStride);
  _tile_dpbssd(1, 4, 6);
  _tile_stream_loadd(7, b + apart, kStride);
  _tile_dpbssd(2, 4, 7);
  _tile_stream_loadd(5, b + apart + kStride / 2, kStride);
  _tile_dpbssd(3, 4, 5);
}

// The sums of a tile [rows][32].
template <bool kTall>
inline __attribute__((always_inline)) void store_sums(int32_t* out) {
  _tile_stored(0, out, kSumStride);
  _tile_stored(1, out + kHalf, kSumStride);
  if constexpr (kTall) _tile_stored(2, out + kLower, kSumStride);
  if constexpr (kTall) _tile_stored(3, out + kLower + kHalf, kSumStride);
}

// Prefetches the 64 k of a panel at `ahead`.
template <int kHint>
inline void fetch_step(const int8_t* ahead) {
  if constexpr (kHint == kNothing) return;
  asm("" : "+r"(ahead));  // or GCC keeps an address for each line, more than there are registers
#pragma GCC unroll 32
  for (int i = 0; i < kDepth * kPanel; i += 64) fetch<kHint>(ahead + i);
}

}  // namespace
}  // namespace qfx::cpu
