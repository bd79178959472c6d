// int8_linear_groups_dynamic as other operators call it.
#pragma once

#include "cpu/ops/linear.h"

namespace qfx::cpu {

struct DynamicGroups {
  DynamicLinear linear;  // w_scale [N, G] or [N, 1]
  std::optional<Tensor> w_zero;
  int64_t group;  // of x, or 0
};

struct GroupedLinearOfFloats {
  Tensor y, x;  // x contiguous
  // The root mean square of the scales of each row's elements, in memory of the calling thread
  // until the next call; null where none were asked for or y has no elements.
  const double* sizes;
};

// y[m][n] of x[m][k]. `op` is named in errors.
GroupedLinearOfFloats grouped_linear_of_floats(const char* op, const Tensor& x,
                                               const DynamicGroups& how, bool with_sizes);

}  // namespace qfx::cpu
