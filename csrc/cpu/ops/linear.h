// linear_dynamic as other operators and generated code call it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/ops/arguments.h"

namespace qfx::cpu {

struct DynamicLinear {
  Tensor weight;
  std::vector<int64_t> layout;
  std::optional<Tensor> bias;
  ActivationCode code;
  std::string activation;
  ScalarType out_dtype;
  std::optional<Tensor> factor;
};

struct LinearOfFloats {
  Tensor y, x;  // x contiguous
  // The root mean square of the scales of each row's elements, in memory of the calling thread
  // until the next call; null where none were requested or y has no elements.
  const double* sizes;
};

// linear_dynamic of operands at addresses, as generated code calls it, without tensors.
struct LinearAt {
  const void* x;  // [rows, k]
  Dtype dtype;
  int64_t rows, k;
  const int8_t* weight;
  int64_t weight_bytes;
  WeightLayoutArgument layout;
  const void* bias;  // [n], or null
  Dtype bias_dtype;
  const float* factor;  // [k], or null
  ActivationCode code;
  Activation activation;
  Dtype out_dtype;
  void* y;  // [rows, n]
};

void linear_at(const char* op, const LinearAt& call);

// y[m][n] of x[m][k]. `op` is named in errors.
LinearOfFloats linear_of_floats(const char* op, const Tensor& x, const DynamicLinear& how,
                                bool with_sizes);

}  // namespace qfx::cpu
