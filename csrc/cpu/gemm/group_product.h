// The product with a weight in groups of K, of which it or the activations have scales, and perhaps
// zero points, of their own. (E3)
#pragma once

#include "cpu/gemm/group_rows.h"

namespace qfx::cpu {

// Values [N, G] at [n * stride_n + g * stride_g]. Columns side by side (stride_n = 1) are read
// where they lie, others are copied a panel at a time.
template <typename T>
struct GroupValues {
  const T* data;  // or null
  int64_t stride_n, stride_g;
};

struct GroupedWeight {
  const PackedWeight& w;
  GroupValues<float> scale;
  GroupValues<int32_t> zero;
};

// to.data[first + m][n] = act(sum_g ... + bias[n])
void grouped_linear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                    const FloatOutput& to, int64_t first);

}  // namespace qfx::cpu
