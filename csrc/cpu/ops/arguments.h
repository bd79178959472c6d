// Reading arguments into the CPU kernels' types, with checks.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "cpu/gemm/integrity.h"
#include "cpu/gemm/quantize.h"
#include "cpu/gemm/weight.h"
#include "operands.h"

namespace qfx::cpu {

void check_cpu(const char* op, const char* what, const Tensor& t);

// Those of check.h, of an operand that must be on the CPU besides.
inline void check_dtype(const char* op, const char* what, const Tensor& t,
                        std::initializer_list<ScalarType> allowed) {
  check_cpu(op, what, t);
  qfx::check_dtype(op, what, t, allowed);
}

inline void check_float(const char* op, const char* what, const Tensor& t) {
  check_cpu(op, what, t);
  qfx::check_float(op, what, t);
}

// The same, of a factor that must be on the CPU besides.
inline void check_cpu_transform(const char* op, const Tensor& x, const Matrix& size,
                                const std::optional<Tensor>& factor, int64_t rotation) {
  if (factor.has_value()) check_cpu(op, "factor", *factor);
  check_transform(op, x, size, factor, rotation);
}

// The rows of x, transformed (R1); x and `factor` must be checked and contiguous.
FloatMatrix float_matrix_of(const char* op, const Tensor& x, const Matrix& size,
                            const std::optional<Tensor>& factor, int64_t rotation);

// Reads the header of a packed weight and what it says of the contents; what is wrong with it, or
// an empty string.
using OpenPacked =
    std::function<std::string(const int8_t* data, int64_t bytes, Contents* contents)>;

// Makes a packed weight contiguous, once its header says that it is one, and opens it. `maker` is
// the operator that packs.
void open_whole(const char* op, const char* maker, Tensor* packed, const OpenPacked& open);

// Makes `packed` contiguous and opens it for activations x with k columns; what it says is compared
// with `layout`, an operator's argument.
Weight weight_of(const char* op, Tensor* packed, const Tensor& x, int64_t k,
                 const std::vector<int64_t>& layout);

// Opens the packed weight at an address for activations with k columns; what it says is compared
// with `layout`.
Weight weight_at(const char* op, const int8_t* data, int64_t bytes, int64_t k,
                 const WeightLayoutArgument& layout);

// The same of a weight of one scale for each row, with n rows.
Weight whole_weight_of(const char* op, Tensor* packed, const Tensor& x, int64_t k, int64_t n);

// A zero point int32 for each of `rows` rows, or one for all.
void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows);

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype);

// Memory for a packed weight; when it is freed, it is no longer known to be whole (integrity.h).
Tensor empty_packed(int64_t size);

void check_bias(const char* op, const std::optional<Tensor>& bias, int64_t n);

// Checks bias[n]; returns it as float, null without a bias: the tensor's own memory where that will
// do, else memory of the calling thread until the next call.
const float* bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n);

// The same of n floats at an address.
const float* bias_at(const void* data, Dtype dtype, int64_t n);

}  // namespace qfx::cpu
