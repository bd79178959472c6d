// Products of groups of K that have scales of their own, added up as floats. (E3)
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/tuning.h"

namespace qfx::cpu {

// Up to so many products of two codes, each less its zero point, the constants of a row fit pairs
// of 16 bits.
inline constexpr int64_t kLongestPaired = 128;

// What becomes of the raw sums of row m, column n and group g:
//     sums[m][n] = fma(float(raw + add - mul * colsum - sum * zero), row_scale * scale, sums[m][n])
// Values of rows lie at [g * row_step + m], others at [g * step + n].
struct GroupTerms {
  const int32_t *row_add, *row_mul, *row_sum;
  // The low 16 bits of mul and, above them, of sum; for tiles. Null where mul is that of the format
  // and zero is null.
  const int32_t* row_pair;
  const float* row_scale;
  int64_t row_step;
  const int32_t* colsum;  // with a step of 32
  const float* scale;
  int64_t scale_step;
  const int32_t* zero;  // or null
  int64_t zero_step;
  float* sums;  // [rows][32]
};

// Rows of a tile and `groups` groups of `depth` codes each. Prefetches as many bytes from `ahead`
// on as it reads from b; they need not exist.
struct GroupTile {
  int rows;
  const uint8_t* a;
  int64_t lda;
  const int8_t* b;
  int64_t groups, depth;
  const int8_t* ahead;
  int32_t mul;  // of the format
  GroupTerms terms;
};

using GroupTileFn = void (*)(const GroupTile&);

// Tiles of 1, 2, ... rows: for terms without pairs and with them.
struct GroupTiles {
  const GroupTileFn* tiles[2];
  const GroupTileFn* prefetching[2];
  const GroupTileFn* few[2][kHints];  // those of Format::few
};

}  // namespace qfx::cpu
