// int8_linear_groups_dynamic as other operators call it.
#pragma once

#include "cpu/ops/linear.h"

namespace qfx::cpu {

struct DynamicGroups {
  DynamicLinear linear;  // w_scale [N, G] or [N, 1]
  std::optional<Tensor> w_zero;
  int64_t group;  // of x, or 0
};

// y[m][n] of x[m][k]. `sizes`, if given, becomes the root mean square of the scales of each row's
// elements. `op` is named in errors.
Tensor grouped_linear_of_floats(const char* op, const Tensor& x, const DynamicGroups& how,
                                double* sizes);

}  // namespace qfx::cpu
