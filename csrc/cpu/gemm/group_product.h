// The product with a weight that has a scale, and perhaps a zero point, for each group of K. (E3)
#pragma once

#include "cpu/gemm/product.h"

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

// Codes q [count, K], arranged group by group in memory of the calling thread, and the constants of
// each group g and row m at [g * count + m].
struct GroupedRows final : RowSource {
  const PackedWeight& w;
  const int8_t* q;
  const int32_t* zero_points;
  int64_t zero_stride;
  int32_t *add, *sum;  // sum_k (q - z)

  GroupedRows(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
              const int32_t* zero_points, int64_t zero_stride, int64_t count);

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const override;
};

// to.data[first + m][n] = act(sum_g ... * row_scale[(first + m) * scale_stride] + bias[n])
void grouped_linear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                    const FloatOutput& to, const float* row_scale, int64_t scale_stride,
                    int64_t first);

}  // namespace qfx::cpu
