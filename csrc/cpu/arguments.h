// What the CPU operators share: reading arguments into the kernels' types, with checks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/pack.h"
#include "cpu/quantize.h"

namespace qfx::cpu {

// Number of rows and columns of a tensor [..., K] viewed as a matrix.
struct Matrix {
  int64_t rows, columns;
};

Matrix matrix_of(const char* op, const char* what, const Tensor& t);

Dtype dtype_of(const char* op, ScalarType dtype);

Activation activation_of(const char* op, const std::string& name);

CodeSpec code_spec_of(const char* op, const std::vector<int64_t>& axes, int64_t bits,
                      bool symmetric);

// Opens a packed weight for activations with k columns and n outputs; `packed` must be contiguous.
PackedWeight packed_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k, int64_t n);

// The shape of t with its last size replaced.
std::vector<int64_t> with_last(const Tensor& t, int64_t last);

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype);

// bias[n] as float; zero without a bias.
std::vector<float> bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n);

}  // namespace qfx::cpu
