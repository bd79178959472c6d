// What the CPU operators share: reading arguments into the kernels' types, with checks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/pack.h"
#include "cpu/quantize.h"
#include "text.h"

namespace qfx::cpu {

// Number of rows and columns of a tensor [..., K] viewed as a matrix.
struct Matrix {
  int64_t rows, columns;
};

Matrix matrix_of(const char* op, const char* what, const Tensor& t);

// The rows of x, transformed (R1); x and `factor` must be contiguous.
FloatMatrix float_matrix_of(const char* op, const Tensor& x, const Matrix& size,
                            const std::optional<Tensor>& factor, int64_t rotation);

Dtype dtype_of(const char* op, ScalarType dtype);

Activation activation_of(const char* op, const std::string& name);

CodeSpec code_spec_of(const char* op, const std::vector<int64_t>& axes, int64_t bits,
                      bool symmetric);

// Opens a packed weight for activations with k columns and n outputs; `packed` must be contiguous.
PackedWeight packed_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k, int64_t n);

// A zero point int32 for each of `rows` rows, or one for all.
void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows);

// Step from the value of a row to that of the next in a contiguous tensor: 0 where one is for all.
inline int64_t stride_of(const Tensor& per_row) { return per_row.numel() == 1 ? 0 : 1; }

inline const int32_t* ints(const Tensor& t) {
  return static_cast<const int32_t*>(t.const_data_ptr());
}

inline const float* floats(const Tensor& t) {
  return static_cast<const float*>(t.const_data_ptr());
}

// The shape of t with its last size replaced.
std::vector<int64_t> with_last(const Tensor& t, int64_t last);

// t itself where it is contiguous, without a call of the dispatcher.
Tensor made_contiguous(const Tensor& t);
std::optional<Tensor> made_contiguous(const std::optional<Tensor>& t);

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype);

// bias[n] as float, null without a bias: the tensor's own memory where that will do, else memory of
// the calling thread until the next call.
const float* bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n);

}  // namespace qfx::cpu
