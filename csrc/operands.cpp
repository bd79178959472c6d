#include "operands.h"

#include <algorithm>

namespace qfx {

Matrix matrix_of(const char* op, const char* what, const Tensor& t) {
  STD_TORCH_CHECK(t.dim() >= 1, op, ": ", what, " is a scalar, expected at least one dimension");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return {rows, t.size(t.dim() - 1)};
}

void check_transform(const char* op, const Tensor& x, const Matrix& size,
                     const std::optional<Tensor>& factor, int64_t rotation) {
  const int64_t k = size.columns;
  STD_TORCH_CHECK(is_rotation(rotation), op, ": rotation=", rotation, ", expected 0, 16 or 64");
  if (!factor.has_value()) return;
  check_dtype(op, "factor", *factor, {ScalarType::Float});
  STD_TORCH_CHECK(factor->dim() == 1 && factor->numel() == k, op, ": factor has shape ",
                  shape_of(*factor), " but x has K=", k, " (shape ", shape_of(x),
                  "), expected one element for each k");
}

Transform transform_of(const std::optional<Tensor>& factor, int64_t rotation) {
  return {factor.has_value() ? floats(*factor) : nullptr, static_cast<int>(rotation)};
}

Dtype dtype_of(const char* op, ScalarType dtype) {
  if (dtype == ScalarType::Float) return Dtype::kFloat32;
  if (dtype == ScalarType::BFloat16) return Dtype::kBFloat16;
  STD_TORCH_CHECK(dtype == ScalarType::Half, op, ": out_dtype is ", dtype_name(dtype),
                  ", expected Float, BFloat16 or Half");
  return Dtype::kFloat16;
}

Activation activation_of(const char* op, const std::string& name) {
  for (Activation activation : kActivations) {
    if (name == kActivationNames[static_cast<int>(activation)]) return activation;
  }
  std::string known;
  for (const char* each : kActivationNames) known.append(known.empty() ? "" : ", ").append(each);
  STD_TORCH_CHECK(false, op, ": unknown activation '", name, "', expected one of ", known);
}

CodeSpec code_spec_of(const char* op, const std::vector<int64_t>& axes, int64_t bits,
                      bool symmetric) {
  STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits=", bits, " is outside 2..8");
  const bool per_row = axes == std::vector<int64_t>{1};
  const bool per_tensor = axes == std::vector<int64_t>{0, 1};
  std::string given;
  for (int64_t axis : axes) given.append(given.empty() ? "" : ", ").append(std::to_string(axis));
  STD_TORCH_CHECK(per_row || per_tensor, op, ": axes=[", given,
                  "], expected [1] (one scale per row) or [0, 1] (one for the matrix)");
  return {static_cast<int>(bits), symmetric, per_tensor};
}

ActivationCode activation_code_of(const char* op, std::span<const int64_t> code) {
  STD_TORCH_CHECK(code.size() >= 5, op, ": code has ", code.size(),
                  " numbers, expected bits, symmetric, per_tensor, group and rotation");
  const int64_t bits = code[0], group = code[3];
  STD_TORCH_CHECK(bits >= 2 && bits <= 8, op, ": bits=", bits, " is outside 2..8");
  if (group != 0) check_group(op, group);
  STD_TORCH_CHECK(group == 0 || code[2] == 0, op, ": code has groups of ", group,
                  " and one scale for the tensor, expected one of them");
  return {{static_cast<int>(bits), code[1] != 0, code[2] != 0}, group, code[4]};
}

WeightLayoutArgument layout_argument_of(const char* op, std::span<const int64_t> layout) {
  STD_TORCH_CHECK(layout.size() == 5, op, ": layout has ", layout.size(),
                  " numbers, expected n, bits, group, scale_group and shift");
  return {layout[0], layout[1], layout[2], layout[3], layout[4]};
}

void check_col_scale(const char* op, const Tensor& col_scale, const Tensor& q) {
  check_dtype(op, "col_scale", col_scale, {ScalarType::Float});
  const int64_t n = q.size(q.dim() - 1);
  if (col_scale.dim() <= 1) return check_vector(op, "col_scale", col_scale, n);
  std::vector<int64_t> expected(q.sizes().begin(), q.sizes().end());
  if (expected.size() >= 2) expected[expected.size() - 2] = 1;
  STD_TORCH_CHECK(std::equal(expected.begin(), expected.end(), col_scale.sizes().begin(),
                             col_scale.sizes().end()),
                  op, ": col_scale has shape ", shape_of(col_scale), " and q has shape ",
                  shape_of(q), ", expected [N], or [*B, 1, N] for q [*B, M, N]");
}

void check_group(const char* op, int64_t group, int64_t multiple) {
  STD_TORCH_CHECK(group > 0 && group % multiple == 0, op, ": group=", group,
                  ", expected a multiple of ", multiple);
}

void check_codes(const char* op, const Tensor& codes, int64_t group, int64_t multiple) {
  check_dtype(op, "codes", codes, {ScalarType::Char});
  STD_TORCH_CHECK(codes.dim() == 2, op, ": codes have shape ", shape_of(codes),
                  ", expected [N, K]");
  const int64_t k = codes.size(1);
  STD_TORCH_CHECK(k <= kMaxK, op, ": K=", k, " is above ", kMaxK,
                  ", where the int32 accumulator of a dot product could overflow");
  STD_TORCH_CHECK(group >= 0 && group % multiple == 0, op, ": group=", group,
                  ", expected 0 (one scale for all of K) or a multiple of ", multiple);
}

bool check_of_rows_or_groups(const char* op, const char* what, const Tensor& t, const Tensor& codes,
                             int64_t group) {
  const int64_t n = codes.size(0), k = codes.size(1);
  const int64_t groups = group == 0 ? 1 : (k + group - 1) / group;
  const bool of_rows = t.numel() == n && (t.dim() == 1 || (t.dim() == 2 && t.size(1) == 1));
  const bool of_none = k == 0 && t.dim() == 2 && t.size(0) == n && t.size(1) == 0;
  const bool by_group = group != 0 && t.dim() == 2 && t.size(0) == n && t.size(1) == groups;
  STD_TORCH_CHECK(of_rows || by_group || of_none, op, ": ", what, " has shape ", shape_of(t),
                  ", expected ", n, ", ", n, "x1 or ", n, "x", groups,
                  ": one for each row, or for each group of ", group, " of K=", k);
  return by_group;
}

std::vector<int64_t> with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
  shape.back() = last;
  return shape;
}

OutOfMemory out_of_memory(const std::vector<int64_t>& shape, ScalarType dtype) {
  int64_t count = 1;
  for (int64_t size : shape) {
    if (__builtin_mul_overflow(count, size, &count)) count = -1;
  }
  const int64_t element = dtype == ScalarType::Double || dtype == ScalarType::Long     ? 8
                          : dtype == ScalarType::Float || dtype == ScalarType::Int     ? 4
                          : dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 2
                                                                                       : 1;
  return {bytes_of(count, element),
          "a tensor of shape " + text_of(shape) + " and dtype " + dtype_name(dtype)};
}

Tensor made_contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  const std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
  return allocated(shape, t.scalar_type(), [&] { return torch::stable::contiguous(t); });
}

std::optional<Tensor> made_contiguous(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(made_contiguous(*t)) : std::nullopt;
}

}  // namespace qfx
