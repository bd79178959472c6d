// What runs on CUDA as operators of qfx/ops/cuda_float_linear.py, called by name: linears that are
// float matmuls, and packing of 4 and 5 bits, whose packed weight is that of the CPU.
#pragma once

#include <array>
#include <optional>

#include "cuda/ops/arguments.h"

namespace qfx::cuda {

Tensor low_bit_pack(const char* op, const Tensor& codes, const Tensor& scale,
                    const std::optional<Tensor>& zero_point, const std::optional<Tensor>& minimum,
                    int64_t bits, int64_t group);

// Codes, scale, zero point and minimum.
std::array<Tensor, 4> low_bit_unpack(const char* op, const Tensor& weight,
                                     const WeightLayoutArgument& layout, int64_t k);

// Of float activations x and the values of a weight [N, K] in the dtype of x. (W5)
Tensor value_linear(const char* op, const Tensor& x, const Tensor& values,
                    const std::optional<Tensor>& bias, const std::string& activation,
                    ScalarType out_dtype);

// Of float activations x and a weight of 8 bits with one scale per row. (W1)
Tensor weight_only_linear(const char* op, const Tensor& x, const Tensor& weight,
                          const WeightLayout& layout, const std::optional<Tensor>& bias,
                          const std::string& activation, ScalarType out_dtype);

}  // namespace qfx::cuda
