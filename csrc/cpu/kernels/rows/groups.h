// Products of groups of K, each with its own scale and zero point of the weight, summed as floats:
//     sums[m][n] += float(raw + add - mul * colsum - sum * zero) * scale,   group after group. (E3)
#pragma once

#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

template <bool kZero>
inline void add_groups_to_row(const GroupArgs& a, int m) {
  const uint32_t mul = static_cast<uint32_t>(a.row_mul[m]);
  const int32_t *raw = a.raw + m * kPanel, *colsum = a.colsum, *zero = a.zero;
  const float* scale = a.scale;
  float sums[kPanel];  // in registers from group to group
  // Sums are never -0. Without the addition compilers copy by pieces, which the loop then waits
  // for.
  for (int n = 0; n < kPanel; ++n) sums[n] = a.sums[m * kPanel + n] + 0.f;
  for (int64_t g = 0; g < a.groups; ++g) {
    const uint32_t add = static_cast<uint32_t>(a.row_add[g * a.row_step + m]);
    const uint32_t sum = kZero ? static_cast<uint32_t>(a.row_sum[g * a.row_step + m]) : 0;
    for (int n = 0; n < kPanel; ++n) {
      uint32_t acc = static_cast<uint32_t>(raw[n]) + add - mul * static_cast<uint32_t>(colsum[n]);
      if constexpr (kZero) acc -= sum * static_cast<uint32_t>(zero[n]);
      sums[n] = sums[n] + static_cast<float>(static_cast<int32_t>(acc)) * scale[n];
    }
    raw += a.rows * kPanel;
    colsum += kPanel;
    scale += a.scale_step;
    if constexpr (kZero) zero += a.zero_step;
  }
  for (int n = 0; n < kPanel; ++n) a.sums[m * kPanel + n] = sums[n];
}

inline void add_groups(const GroupArgs* args) {
  for (int m = 0; m < args->rows; ++m) {
    if (args->zero == nullptr) {
      add_groups_to_row<false>(*args, m);
    } else {
      add_groups_to_row<true>(*args, m);
    }
  }
}

}  // namespace
}  // namespace qfx::cpu
