// Scales and zero points of rows, or of their groups of K, as operators are given them.
#pragma once

#include "cpu/gemm/group_rows.h"
#include "cpu/ops/arguments.h"

namespace qfx::cpu {

// One for all rows, one for each of them, or one for each of their groups; t must be contiguous.
template <typename T>
RowValues<T> row_values_of(const char* op, const char* what, const Tensor& t, int64_t rows,
                           int64_t groups) {
  const T* data = static_cast<const T*>(t.const_data_ptr());
  const bool by_group =
      groups != 1 && t.dim() > 0 && t.size(-1) == groups && t.numel() == rows * groups;
  STD_TORCH_CHECK(by_group || t.numel() == 1 || t.numel() == rows, op, ": ", what, " has shape ",
                  shape_of(t), ", expected one value, one for each of ", rows,
                  " rows, or one for each of their ", groups, " groups");
  if (by_group) return {data, groups, 1};
  return {data, t.numel() == 1 ? 0 : 1, 0};
}

// Groups of x are those that the weight was packed in.
inline void check_group_of_x(const char* op, int64_t group, const PackedWeight& w) {
  const bool same = group == w.group || (group >= w.k && w.group >= w.k);
  STD_TORCH_CHECK(group == 0 || same, op, ": group=", group, ", expected 0 or the ", w.group,
                  " that the weight was packed in");
}

}  // namespace qfx::cpu
