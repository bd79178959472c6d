// int8_linear_dynamic as other operators call it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/arguments.h"

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

// y[m][n] of x[m][k]; the scales of x's rows go to scales[m].
// `op` is named in errors.
Tensor linear_of_floats(const char* op, const Tensor& x, const DynamicLinear& how, float* scales);

}  // namespace qfx::cpu
