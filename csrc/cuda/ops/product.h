// Products of tensors: rows that tensor cores can read, and the kernel for a GPU and a shape.
#pragma once

#include <optional>

#include "cuda/gemm/gemm.h"
#include "cuda/ops/arguments.h"

namespace qfx::cuda {

// Rows and the tensor that they lie in.
struct OwnedRows {
  Tensor memory;
  Rows rows;
};

// The rows of codes q [..., K]: q itself, or a copy where rows do not begin at multiples of 16
// bytes.
OwnedRows rows_of_codes(const Tensor& q, const Matrix& size, Stream stream);

// The same for each matrix of t [*B, R, K], whose rows or whose columns may be contiguous.
OwnedRows rows_of_matrices(const Tensor& t, Stream stream);

Rows rows_of_weight(const PackedWeight& w);

// A value for each of `rows` rows, or one for all.
void check_zero_points(const char* op, const char* what, const Tensor& zero_point, int64_t rows);
void check_row_scales(const char* op, const char* what, const Tensor& scale, int64_t rows);

// One element for each of n columns.
void check_col_scales(const char* op, const char* what, const Tensor& scale, int64_t n);
void check_bias(const char* op, const std::optional<Tensor>& bias, int64_t n);

// The values of checked tensors, which must be contiguous.
inline PerRow<int32_t> zero_points_of(const Tensor& t) { return {ints(t), stride_of(t)}; }
inline PerRow<float> row_scales_of(const Tensor& t) { return {floats(t), stride_of(t)}; }
AnyFloats bias_of(const char* op, const std::optional<Tensor>& bias);

// The codes of x [..., K] with their scales and zero points, made on the way.
struct QuantizedRows {
  Tensor q, scale, zero_point;
};
QuantizedRows quantized_rows(const char* op, const Tensor& x, const CodeSpec& spec, Stream stream,
                             const std::optional<Tensor>& factor = std::nullopt,
                             int64_t rotation = 0);

// Runs a product whose operands lie beside `like`.
void run_product(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                 const Rows& w, const CodeTerms& terms, const Output& out);
void run_product(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                 const Rows& w, const SignTerms& terms, const Output& out);

// The same where groups of K have sums of their own, or the weight has zero points. `out` wants no
// scales of columns, which lie in w. (E3)
void run_groups(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                const PackedWeight& w, const PerRow<int32_t>& zero, const Output& out);

}  // namespace qfx::cuda
