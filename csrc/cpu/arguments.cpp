#include "cpu/arguments.h"

#include <algorithm>

#include "cpu/pages.h"
#include "cpu/scratch.h"

namespace qfx::cpu {

Matrix matrix_of(const char* op, const char* what, const Tensor& t) {
  STD_TORCH_CHECK(t.dim() >= 1, op, ": ", what, " is a scalar, expected at least one dimension");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return {rows, t.size(t.dim() - 1)};
}

FloatMatrix float_matrix_of(const char* op, const Tensor& x, const Matrix& size,
                            const std::optional<Tensor>& factor, int64_t rotation) {
  const int64_t k = size.columns;
  Transform transform = {};
  STD_TORCH_CHECK(rotation == 0 || rotation == 16 || rotation == 64, op, ": rotation=", rotation,
                  ", expected 0, 16 or 64");
  STD_TORCH_CHECK(rotation == 0 || k % rotation == 0, op, ": x has K=", k, " (shape ", shape_of(x),
                  "), which rotation=", rotation, " does not divide");
  transform.rotation = static_cast<int>(rotation);
  if (factor.has_value()) {
    check_dtype(op, "factor", *factor, {ScalarType::Float});
    STD_TORCH_CHECK(factor->dim() == 1 && factor->numel() == k, op, ": factor has shape ",
                    shape_of(*factor), " but x has K=", k, " (shape ", shape_of(x),
                    "), expected one element for each k");
    transform.factor = floats(*factor);
  }
  return {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, k, k, transform};
}

Dtype dtype_of(const char* op, ScalarType dtype) {
  if (dtype == ScalarType::Float) return Dtype::kFloat32;
  if (dtype == ScalarType::BFloat16) return Dtype::kBFloat16;
  STD_TORCH_CHECK(dtype == ScalarType::Half, op, ": out_dtype is ", dtype_name(dtype),
                  ", expected Float, BFloat16 or Half");
  return Dtype::kFloat16;
}

Activation activation_of(const char* op, const std::string& name) {
  static const char* const names[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  const auto found = std::find(std::begin(names), std::end(names), name);
  STD_TORCH_CHECK(found != std::end(names), op, ": unknown activation '", name,
                  "', expected none, relu, gelu, gelu_tanh or silu");
  return static_cast<Activation>(found - std::begin(names));
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

PackedWeight packed_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k,
                       int64_t n) {
  check_dtype(op, "the packed weight", packed, {ScalarType::Char});
  STD_TORCH_CHECK(packed.dim() == 1, op, ": the packed weight has shape ", shape_of(packed),
                  ", pack_weight returns one dimension");
  PackedWeight weight;
  const std::string fault =
      open_packed(static_cast<const int8_t*>(packed.const_data_ptr()), packed.numel(), &weight);
  STD_TORCH_CHECK(fault.empty(), op, ": not a packed weight of this build: ", fault);
  STD_TORCH_CHECK(weight.k == k, op, ": x has K=", k, " (shape ", shape_of(x),
                  ") but the weight was packed for K=", weight.k);
  STD_TORCH_CHECK(weight.n == n, op, ": N=", n,
                  " is asked for (n, or the size of w_scale) but the "
                  "weight was packed for N=",
                  weight.n);
  return weight;
}

void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows) {
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  check_per_row(op, "zero_point", zero_point, rows);
}

std::vector<int64_t> with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
  shape.back() = last;
  return shape;
}

Tensor made_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

std::optional<Tensor> made_contiguous(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(made_contiguous(*t)) : std::nullopt;
}

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype) {
  // The C library maps what is larger anew at each call: in small pages that costs more than to
  // write it, for logits as much as their product.
  constexpr int64_t kAlwaysMapped = 32 << 20;
  Tensor made = torch::stable::empty({shape.data(), shape.size()}, dtype);
  const int64_t bytes = made.numel() * made.element_size();
  if (bytes >= kAlwaysMapped) prefer_huge_pages(made.mutable_data_ptr(), bytes);
  return made;
}

const float* bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n) {
  if (!bias.has_value()) return nullptr;
  check_float(op, "bias", *bias);
  check_vector(op, "bias", *bias, n);
  const Dtype dtype = dtype_of(op, bias->scalar_type());
  const bool contiguous = bias->is_contiguous();
  if (dtype == Dtype::kFloat32 && contiguous) return floats(*bias);
  const Tensor flat = contiguous ? *bias : made_contiguous(*bias);
  thread_local Scratch scratch;
  float* values = scratch.get<float>(std::max<int64_t>(n, 1));
  if (dtype == Dtype::kFloat32) {
    std::copy_n(floats(flat), n, values);
  } else {
    kernels_of(current_isa()).row->widen(flat.const_data_ptr(), dtype, n, values);
  }
  return values;
}

}  // namespace qfx::cpu
