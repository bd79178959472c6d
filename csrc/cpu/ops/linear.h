// int8_linear_dynamic as other operators call it.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cpu/ops/arguments.h"

namespace qfx::cpu {

struct DynamicLinear {
  Tensor packed, w_scale;
  std::optional<Tensor> bias;
  CodeSpec spec;
  std::string activation;
  ScalarType out_dtype;
  std::optional<Tensor> factor;
  int64_t rotation;
};

// How many scales of x's rows there are: none is written where the output has no elements.
inline int64_t scales_for(const Matrix& x, const Tensor& w_scale) {
  return w_scale.numel() == 0 ? 1 : std::max<int64_t>(x.rows, 1);
}

// y[m][n] of x[m][k]; the scales of x's rows go to scales[m].
// `op` is named in errors.
Tensor linear_of_floats(const char* op, const Tensor& x, const DynamicLinear& how, float* scales);

}  // namespace qfx::cpu
