// int8_linear_dynamic as other operators call it.
#pragma once

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

struct LinearOfFloats {
  Tensor y, x;  // x contiguous
  // Of x's rows, in memory of the calling thread until the next call; null where y has no elements.
  const float* scales;
};

// y[m][n] of x[m][k]. `op` is named in errors.
LinearOfFloats linear_of_floats(const char* op, const Tensor& x, const DynamicLinear& how);

}  // namespace qfx::cpu
