// What the operators of all devices share: reading arguments, with checks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "memory.h"
#include "text.h"
#include "types.h"

namespace qfx {

// Number of rows and columns of a tensor [..., K] viewed as a matrix.
struct Matrix {
  int64_t rows, columns;
};

Matrix matrix_of(const char* op, const char* what, const Tensor& t);

// What x's rows are to be transformed by (R1).
void check_transform(const char* op, const Tensor& x, const Matrix& size,
                     const std::optional<Tensor>& factor, int64_t rotation);

// The transform (R1) of a checked `factor`, which must be contiguous.
Transform transform_of(const std::optional<Tensor>& factor, int64_t rotation);

Dtype dtype_of(const char* op, ScalarType dtype);

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

Activation activation_of(const char* op, const std::string& name);

CodeSpec code_spec_of(const char* op, const std::vector<int64_t>& axes, int64_t bits,
                      bool symmetric);

// How an activation is quantized: `group` elements of K share a scale, or all (0), after K was
// rotated in blocks of `rotation` (R1).
struct ActivationCode {
  CodeSpec spec;
  int64_t group, rotation;
};

// Of the numbers of an operator's `code`: qfx/ops/code.py.
ActivationCode activation_code_of(const char* op, std::span<const int64_t> code);

// What a caller knows of a packed weight: qfx/ops/layout.py.
struct WeightLayoutArgument {
  int64_t n, bits, group, scale_group, shift;

  bool one_scale() const { return bits == 8 && group == 0 && scale_group == 0 && shift == 0; }
};

WeightLayoutArgument layout_argument_of(const char* op, std::span<const int64_t> layout);

// One scale for each column of q [*B, M, N]: [N], or [*B, 1, N], one for each matrix.
void check_col_scale(const char* op, const Tensor& col_scale, const Tensor& q);

// How many elements of K share a scale.
void check_group(const char* op, int64_t group, int64_t multiple = kGroupMultiple);

// Codes to pack: int8 [N, K], whose products are summed in groups of `group` elements of K, or 0.
void check_codes(const char* op, const Tensor& codes, int64_t group,
                 int64_t multiple = kGroupMultiple);

// The scale or the zero point of codes to pack: [N], [N, 1], or [N, G] for groups of `group`.
// Returns whether it is by group.
bool check_of_rows_or_groups(const char* op, const char* what, const Tensor& t, const Tensor& codes,
                             int64_t group);

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

// "It asked for 60 bytes, a tensor of shape 5x3 and dtype Float".
OutOfMemory out_of_memory(const std::vector<int64_t>& shape, ScalarType dtype);

// The tensor that `make` allocates. Nothing else can fail in it, and across torch's C interface
// comes no reason, so its error is OutOfMemory.
template <typename Make>
Tensor allocated(const std::vector<int64_t>& shape, ScalarType dtype, const Make& make) {
  try {
    return make();
  } catch (const std::exception&) {
    throw out_of_memory(shape, dtype);
  }
}

// t itself where it is contiguous, without a call of the dispatcher. An expanded t may have any
// number of elements, so operators copy an operand after they have checked all of them.
Tensor made_contiguous(const Tensor& t);
std::optional<Tensor> made_contiguous(const std::optional<Tensor>& t);

}  // namespace qfx
