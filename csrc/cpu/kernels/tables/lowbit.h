// Weights whose codes take 4 or 5 bits, in groups of K: how a panel of them lies in memory, and
// what reads it. (E4)
//
// A code c of b bits is stored as u = c + 2^(b-1), 0 <= u < 2^b. A panel of 32 columns begins with
//     zero    uint8 [G][32]                u of the zero points of all groups, or
//     minimum uint16 [G][32]               as the scales,    padded with zeros to 64 bytes
// or nothing, so that it is read from its first line to its last. For each group of `group`
// consecutive k follow
//     scale   uint16 [32]                  bfloat16 or float16
//     nibbles uint8 [group / 8][32][4]     of column n: k = 8 i + j low, k = 8 i + 4 + j high
//     fifth   uint64 [group / 8][2][2]     of 5 bits only: [i][h][v] holds u >> 4 of
//                                          k = 8 i + 4 h + j and column 16 v + n at bit 4 n + j
// The last group is as long as the others; what lies beyond K is the zero point.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/tables/tuning.h"
#include "types.h"

namespace qfx::cpu {

inline constexpr int kFewestBits = 4, kBitWidths = 2;  // 4 and 5

// Few rows of codes times panels, whose codes become bytes in registers:
//     sums[m][n] = fma(float(sum_k q[m][k] u[k][n] - row_sum zero[n]), row_scale scale[n], ...)
// from 0, group by group. q are symmetric codes, as they are. Values of rows lie at
// [g * row_step + m].
struct LowbitTile {
  int rows;
  const int8_t* q;
  int64_t ldq;
  const uint8_t* b;                   // the groups of the first panel
  int64_t block;                      // bytes of a group
  int64_t groups, depth, last_depth;  // of K, multiples of 32: of all groups but the last, and its
  const uint8_t* zero;                // or null: 2^(bits - 1)
  int64_t panels, next;               // how many, and bytes from one to the next
  Dtype scales;
  int64_t ahead;  // prefetch distance in bytes; the memory need not exist
  const int32_t* row_sum;
  const float* row_scale;
  int64_t row_step;
  float* sums;  // [panels][rows][32]
};

using LowbitTileFn = void (*)(const LowbitTile&);

// A group of a panel, unpacked: u - zero as int8 [depth / 4][32][4] and their sums over k. zero
// [32], or null as above; depth is a multiple of 8.
using UnpackGroupFn = void (*)(const uint8_t* block, int64_t depth, int64_t group,
                               const uint8_t* zero, int8_t* codes, int32_t* colsum);

// Tables of functions are by bits - 4.
struct LowbitKernels {
  UnpackGroupFn unpack[kBitWidths];
  // sums[n] = fma(values[n], factor * scale[n], sums[n]), 32 of each.
  void (*add_scaled)(const float* values, float factor, const float* scale, float* sums);
  // Up to 32 floats, rounded to a half type.
  void (*narrow)(const float* values, int count, Dtype dtype, void* out);
  // Few rows, as `rows` arranges them: tiles of 1, 2, ... few.rows of these rows, by hint. Null
  // where there are none.
  const Format* rows = nullptr;
  const LowbitTileFn* few[kBitWidths][kHints] = {};
};

}  // namespace qfx::cpu
