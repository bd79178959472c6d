// Scales and zero points of rows, or of their groups of K, as operators receive them.
#pragma once

#include "cpu/gemm/group_rows.h"
#include "cpu/ops/arguments.h"

namespace qfx::cpu {

inline bool is_by_group(const Tensor& t, int64_t rows, int64_t groups) {
  return groups != 1 && t.dim() > 0 && t.size(-1) == groups && t.numel() == rows * groups;
}

// One for all rows, one for each of them, or one for each of their groups.
inline void check_row_values(const char* op, const char* what, const Tensor& t, int64_t rows,
                             int64_t groups) {
  const bool fits = is_by_group(t, rows, groups) || t.numel() == 1 || t.numel() == rows;
  STD_TORCH_CHECK(fits, op, ": ", what, " has shape ", shape_of(t),
                  ", expected one value, one for each of ", rows,
                  " rows, or one for each of their ", groups, " groups");
}

// The values of a checked t, which must be contiguous.
template <typename T>
RowValues<T> row_values_of(const Tensor& t, int64_t rows, int64_t groups) {
  const T* data = static_cast<const T*>(t.const_data_ptr());
  if (is_by_group(t, rows, groups)) return {data, groups, 1};
  return {data, t.numel() == 1 ? 0 : 1, 0};
}

// Groups of x are those that the weight was packed in.
inline void check_group_of_x(const char* op, int64_t group, const PackedWeight& w) {
  const bool same = group == w.group || (group >= w.k && w.group >= w.k);
  STD_TORCH_CHECK(group == 0 || same, op, ": group=", group, ", expected 0 or the ", w.group,
                  " that the weight was packed in");
}

inline void check_group_of_floats(const char* op, const Weight& w, int64_t group) {
  if (!w.one_scale()) return check_group_of_x(op, group, w.shape());
  STD_TORCH_CHECK(group == 0, op, ": group=", group, ", but the weight was packed in one group");
}

}  // namespace qfx::cpu
