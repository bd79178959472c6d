// Linears of floats as other operators and generated code call them.
#pragma once

#include <optional>
#include <span>
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

// A weight of linears and what is done to its products, at addresses.
struct LinearWeightAt {
  const int8_t* weight;
  int64_t weight_bytes;
  WeightLayoutArgument layout;
  const void* bias;  // [n], or null
  Dtype bias_dtype;
  Activation activation;

  // The biases of n outputs as bias_at gives them, or null.
  const float* biases(int64_t n) const {
    return bias == nullptr ? nullptr : bias_at(bias, bias_dtype, n);
  }
};

// linear_dynamic and linears of operands at addresses, as generated code calls them, without
// tensors.
struct LinearsAt {
  const void* x;  // [rows, k]
  Dtype dtype;
  int64_t rows, k;
  const float* factor;  // [k], or null
  ActivationCode code;
  Dtype out_dtype;
  void* y;  // [rows, n] of each weight, one after the other
};

void linears_at(const char* op, const LinearsAt& call, std::span<const LinearWeightAt> weights);

// y[m][n] of x[m][k]. `op` is named in errors.
LinearOfFloats linear_of_floats(const char* op, const Tensor& x, const DynamicLinear& how,
                                bool with_sizes);

}  // namespace qfx::cpu
