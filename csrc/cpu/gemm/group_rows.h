// Activations arranged group by group of K, for weights that are packed in groups. (E3)
#pragma once

#include "cpu/gemm/product.h"

namespace qfx::cpu {

// Values of rows [M, G] or [M, 1], or one for all.
template <typename T>
struct RowValues {
  const T* data;
  int64_t stride_m, stride_g;

  T at(int64_t m, int64_t g) const { return data[m * stride_m + g * stride_g]; }
  RowValues from(int64_t m) const { return {data + m * stride_m, stride_m, stride_g}; }
};

// What holds such rows until the next ones.
struct GroupedMemory {
  RowsMemory rows;
  Scratch integers, floats;
};

// Memory of the calling thread, reused between calls.
GroupedMemory& grouped_memory();

// The constants of group g and row m lie at [g * count + m].
struct GroupedRows : RowSource {
  const PackedWeight& w;
  const bool with_zeros;    // of the weight
  const GroupTiles* tiles;  // of the format, if it has them for such groups
  int32_t *add, *mul, *sum;
  int32_t* pair;  // null if there are no zero points, or no tiles
  float* scale;

  int64_t work() const override;

 protected:
  // `zeros`: whether rows may have zero points.
  GroupedRows(const Format& format, const PackedWeight& w, int64_t count, bool zeros,
              bool with_zeros, GroupedMemory& memory);

  // The codes q [K] of row m, which may be in place already.
  void arrange(const int8_t* q, const RowValues<float>& scales,
               const RowValues<int32_t>& zero_points, int64_t m) const;

 private:
  const bool whole_rows_;  // arranged at once: codes in order, and nothing to add
};

// Whether there is another than 0.
bool any(const RowValues<int32_t>& values, int64_t rows, int64_t groups);

// Codes q [count, K], or rows order[m] of q.
struct GroupedCodes final : GroupedRows {
  const int8_t* q;
  RowValues<float> scales;
  RowValues<int32_t> zero_points;
  const int32_t* order;  // or null

  GroupedCodes(const Format& format, const PackedWeight& w, const int8_t* q,
               const RowValues<float>& scales, const RowValues<int32_t>& zero_points, int64_t count,
               bool with_zeros, const int32_t* order = nullptr,
               GroupedMemory& memory = grouped_memory());

  void fill(int64_t begin, int64_t end) const override;
};

// x [count, K], quantized group by group, or row by row where `by_group` is false, or with the one
// code that all rows have. `sizes`, if not null, becomes the root mean square of the scales of each
// row's elements.
struct GroupedFloats final : GroupedRows {
  const Kernels& kernels;
  FloatMatrix x;
  CodeSpec spec;
  bool by_group;
  const TensorCode* shared;
  double* sizes;

  GroupedFloats(const Kernels& kernels, const Format& format, const PackedWeight& w,
                const FloatMatrix& x, const CodeSpec& spec, bool by_group, const TensorCode* shared,
                bool with_zeros, double* sizes, GroupedMemory& memory = grouped_memory());

  void fill(int64_t begin, int64_t end) const override;
};

}  // namespace qfx::cpu
