// The functions that every instruction set provides for the 1-bit product.
//
// A sign is one bit, 1 for +1 and 0 for -1, so sum_k x[k] w[k] = K - 2 popcount(x ^ w). Bits of a
// row lie in groups of 32 k, k % 8 counting from the least significant bit of byte k / 8; bits
// beyond K are 0 on both sides, which adds nothing.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/tiles.h"

namespace qfx::cpu {

inline constexpr int kBitGroup = 32;  // consecutive k of one column that lie side by side
inline constexpr int kBitGroupBytes = kBitGroup / 8;
inline constexpr int kMaxRowGroup = 2;

// out[r][n] = (accumulate ? out[r][n] : 0) - 2 popcount(a[r] ^ b[n]) over `groups` groups of k, for
// 32 columns n. `stride` leads from one row group of `a` to the next. At most kMaxTileRows rows.
using BinaryTileFn = void (*)(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t groups,
                              int32_t* out, bool accumulate);

struct BinaryKernels {
  int row_group;              // rows that are arranged together; a tile computes whole row groups
  int tile_groups;            // row groups of the tallest tile
  int bytes_per_group;        // of the operand format of one row group, per group of k
  int64_t block;              // groups of k that a tile takes at a time
  int spread_bytes;           // per column and group of k, of the weights that tiles read
  const BinaryTileFn* tiles;  // tiles[g - 1] handles g row groups
  // bits[bytes] = x[k] >= 0, zeros beyond k. Returns whether a NaN was there.
  bool (*signs)(const float* x, int64_t k, int64_t bytes, uint8_t* bits);
  // bits[row_group][4 * groups] -> the operand format, and up to kSlack bytes after it.
  void (*arrange)(const uint8_t* bits, int64_t groups, uint8_t* a);
  // Packed weights [groups][32][4] -> what tiles read; null if that is the packed form itself.
  void (*spread)(const uint8_t* packed, int64_t groups, uint8_t* b);
};

inline constexpr int kSlack = 64;         // bytes after arranged rows and spread weights
inline constexpr int kFetchAhead = 4096;  // bytes, of the floats whose signs are taken

const BinaryKernels& binary_kernels_ref();
#if defined(__x86_64__)
const BinaryKernels& binary_kernels_avx2();
const BinaryKernels& binary_kernels_avx512();
#endif

}  // namespace qfx::cpu
