// A batch of matrices in a tensor [*B, rows, columns].
#pragma once

#include <vector>

#include "cpu/ops/arguments.h"

namespace qfx::cpu {

// They may lie anywhere in memory; strides in elements.
struct Matrices {
  const char* data;
  int64_t element, count, rows, columns, row_stride, column_stride;
  std::vector<int64_t> sizes, strides;  // of the batch axes

  explicit Matrices(const Tensor& t)
      : data(static_cast<const char*>(t.const_data_ptr())),
        element(t.element_size()),
        count(1),
        rows(t.size(t.dim() - 2)),
        columns(t.size(t.dim() - 1)),
        row_stride(t.stride(t.dim() - 2)),
        column_stride(t.stride(t.dim() - 1)),
        sizes(t.sizes().begin(), t.sizes().end() - 2),
        strides(t.strides().begin(), t.strides().end() - 2) {
    for (int64_t size : sizes) count *= size;
  }

  const char* operator[](int64_t i) const {
    int64_t offset = 0;
    for (size_t d = sizes.size(); d-- > 0; i /= sizes[d]) offset += i % sizes[d] * strides[d];
    return data + offset * element;
  }
};

// Rows contiguous, but for rows of one element, whose stride may be anything.
inline Tensor with_contiguous_rows(const Tensor& t) {
  const int64_t axis = t.dim() - 1;
  return t.stride(axis) == 1 ? t : made_contiguous(t);
}

}  // namespace qfx::cpu
