// Linears with weights of 4 and 5 bits on CUDA, whose packed weight is that of the CPU.
#pragma once

#include <optional>
#include <string>

#include "cuda/ops/arguments.h"

namespace qfx::cuda {

// Whether a weight is one of these.
inline bool is_low_bit(const WeightLayoutArgument& layout) { return layout.bits != 8; }

// Of checked operands: float activations x, as they are or those that codes stand for. Few rows are
// multiplied by a kernel (W4), more are a float matmul of the weight's values (W5).
Tensor low_bit_linear(const char* op, const OnDevice& device, const Tensor& x, const Tensor& weight,
                      const WeightLayoutArgument& layout, const std::optional<Tensor>& bias,
                      const std::string& activation, ScalarType out_dtype);

}  // namespace qfx::cuda
