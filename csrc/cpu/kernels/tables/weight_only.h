// Rows of floats times one panel of int8 codes b[g][n][4]: equation (W1).
//     sums[m][n] = s[0][m][n] + s[1][m][n],  from 0 for g = 0, 1, ...
//     s[i][m][n] = fma(x[m][4 g + 2 i + 1], b[g][n][2 i + 1],
//                      fma(x[m][4 g + 2 i], b[g][n][2 i], s[i][m][n]))
// The same operations in the same order on every instruction set. x is zero padded to whole groups.
//
// Few rows make floats of codes in registers. For more rows a part of the panel becomes floats
// once, which stay in the first cache while tiles of rows read them.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/tuning.h"

namespace qfx::cpu {

inline constexpr int kFewFloatRows = 5, kMaxFloatRows = 6;

// `groups` groups, sums [rows][32]. Fetches what lies `ahead` bytes from what it reads of b; it
// need not exist.
using CodesTileFn = void (*)(const float* x, int64_t ldx, const int8_t* b, int64_t groups,
                             int64_t ahead, float* sums);

// Some rows times codes that are floats, w[4 groups][32].
struct FloatTile {
  const float* x;
  int64_t ldx;
  const float* w;
  int64_t groups;
};

// s[rows][2][32], which go on from what they are.
using ChainsTileFn = void (*)(const FloatTile& tile, float* s);
// sums[m][n] = fma(s[0][m][n] + s[1][m][n], scale[n], sums[m][n]), [rows][32].
using ScaledTileFn = void (*)(const FloatTile& tile, const float* scale, float* sums);

// Tables of tiles are by rows - 1.
struct WeightOnlyKernels {
  CodesTileFn codes[kHints][kFewFloatRows];
  // w[4 g + j][n] = b[g][n][j]. Fetches as many bytes behind b as it reads; they need not exist.
  void (*floats_of_codes)(const int8_t* b, int64_t groups, float* w);
  ChainsTileFn chains[kMaxFloatRows];
  ScaledTileFn scaled[kMaxFloatRows];
};

}  // namespace qfx::cpu
