// Products of groups of K, each with its own scales and zero points, summed as floats. (E3)
#pragma once

#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

template <bool kZero>
inline void add_groups_to_row(const int32_t* raw, int64_t groups, int rows, int m,
                              const GroupTerms& t) {
  const int32_t *colsum = t.colsum, *zero = t.zero;
  const float* scale = t.scale;
  float sums[kPanel];  // in registers from group to group
  // Sums are never -0. Without the addition compilers copy by pieces, which the loop then waits
  // for.
  for (int n = 0; n < kPanel; ++n) sums[n] = t.sums[m * kPanel + n] + 0.f;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * t.row_step + m;
    const uint32_t add = static_cast<uint32_t>(t.row_add[at]);
    const uint32_t mul = static_cast<uint32_t>(t.row_mul[at]);
    const uint32_t sum = kZero ? static_cast<uint32_t>(t.row_sum[at]) : 0;
    const float row_scale = t.row_scale[at];
    for (int n = 0; n < kPanel; ++n) {
      uint32_t acc =
          static_cast<uint32_t>(raw[m * kPanel + n]) + add - mul * static_cast<uint32_t>(colsum[n]);
      if constexpr (kZero) acc -= sum * static_cast<uint32_t>(zero[n]);
      const float exact = static_cast<float>(static_cast<int32_t>(acc));
      sums[n] = __builtin_fmaf(exact, row_scale * scale[n], sums[n]);
    }
    raw += rows * kPanel;
    colsum += kPanel;
    scale += t.scale_step;
    if constexpr (kZero) zero += t.zero_step;
  }
  for (int n = 0; n < kPanel; ++n) t.sums[m * kPanel + n] = sums[n];
}

inline void add_groups(const int32_t* raw, int64_t groups, int rows, const GroupTerms* terms) {
  for (int m = 0; m < rows; ++m) {
    if (terms->zero == nullptr) {
      add_groups_to_row<false>(raw, groups, rows, m, *terms);
    } else {
      add_groups_to_row<true>(raw, groups, rows, m, *terms);
    }
  }
}

}  // namespace
}  // namespace qfx::cpu
