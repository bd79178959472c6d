// Reading arguments into the CPU kernels' types, with checks.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "cpu/gemm/pack.h"
#include "cpu/gemm/quantize.h"
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

// The rows of x, transformed (R1); x and `factor` must be contiguous.
FloatMatrix float_matrix_of(const char* op, const Tensor& x, const Matrix& size,
                            const std::optional<Tensor>& factor, int64_t rotation);

// Opens a packed weight for activations with k columns and n outputs; `packed` must be contiguous.
PackedWeight packed_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k, int64_t n);

// A zero point int32 for each of `rows` rows, or one for all.
void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows);

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype);

// Memory for a packed weight; when it is freed, it is no longer known to be whole (whole.h).
Tensor empty_packed(int64_t size);

// bias[n] as float, null without a bias: the tensor's own memory where that will do, else memory of
// the calling thread until the next call.
const float* bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n);

}  // namespace qfx::cpu
