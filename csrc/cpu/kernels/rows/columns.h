// One panel of a float matrix whose columns lie side by side, x[k][32]: each column is quantized by
// itself, symmetric, and the codes go straight into the packed layout (pack.h). Plain loops over
// the columns, compiled by each instruction set's file with its own flags.
#pragma once

#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

// magnitude[n] = the greatest bit pattern of |x[.][n]|; see Range.
inline void range_of_columns(const float* x, int64_t k, int32_t* magnitude) {
  int32_t greatest[kPanel] = {};
  for (int64_t i = 0; i < k; ++i, x += kPanel) {
    for (int n = 0; n < kPanel; ++n) {
      const int32_t size = __builtin_bit_cast(int32_t, x[n]) & 0x7fffffff;
      greatest[n] = size > greatest[n] ? size : greatest[n];
    }
  }
  __builtin_memcpy(magnitude, greatest, sizeof(greatest));
}

// (Q3) and (Q4) by column, as quantize_row: out[groups][32][4], sums of the codes in colsum[32].
inline void quantize_columns(const float* x, int64_t groups, const ColumnCodes* codes, int8_t* out,
                             int32_t* colsum) {
  constexpr float kRound = 12582912.f;
  constexpr int32_t kRoundBits = 0x4b400000;
  const int32_t qmax = codes->qmax;
  int32_t sum[kPanel] = {};
  for (int64_t g = 0; g < groups; ++g, out += kPanel * kGroup) {
    uint32_t group[kPanel] = {};
    for (int i = 0; i < kGroup; ++i, x += kPanel) {
      for (int n = 0; n < kPanel; ++n) {
        int32_t v = __builtin_bit_cast(int32_t, x[n] * codes->inverse[n] + kRound) - kRoundBits;
        v = v < -qmax ? -qmax : v;
        v = (v > qmax ? qmax : v) & codes->finite[n];
        sum[n] += v;
        group[n] |= (static_cast<uint32_t>(v) & 0xff) << 8 * i;
      }
    }
    __builtin_memcpy(out, group, sizeof(group));
  }
  __builtin_memcpy(colsum, sum, sizeof(sum));
}

}  // namespace
}  // namespace qfx::cpu
