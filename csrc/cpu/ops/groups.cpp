// int8_linear_groups, int8_linear_groups_ste and int8_linear_groups_dynamic on the CPU: linears
// whose weights or activations have a scale for each group of K.
#include "cpu/ops/groups.h"

#include <algorithm>
#include <utility>

#include "cpu/core/scratch.h"
#include "cpu/gemm/group_product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// An int32 sum of this many products of two codes less their zero points, both in [-255, 255].
constexpr int64_t kMaxGroup = 33025;

// [N, G], or [N, 1] where all groups of a row have the same.
void check_groups(const char* op, const char* what, const Tensor& t, const PackedWeight& w) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == w.n && (t.size(1) == w.groups() || t.size(1) == 1),
                  op, ": ", what, " has shape ", shape_of(t), ", expected ", w.n, "x", w.groups(),
                  ": a column for each group of ", w.group, " of the K=", w.k,
                  " that the weight was packed for, or ", w.n, "x1");
}

template <typename T>
GroupValues<T> values_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.size(1) == 1 ? 0 : t.stride(1)};
}

// What a caller says of the weight, read into the kernels' types.
GroupedWeight grouped_weight_of(const char* op, const PackedWeight& w, const Tensor& scale,
                                const std::optional<Tensor>& zero) {
  check_groups(op, "w_scale", scale, w);
  GroupedWeight weight = {w, values_of<float>(scale), {nullptr, 0, 0}};
  if (!zero.has_value()) return weight;
  check_dtype(op, "w_zero", *zero, {ScalarType::Int});
  check_groups(op, "w_zero", *zero, w);
  const int64_t longest = std::min(w.group, w.k);
  STD_TORCH_CHECK(longest <= kMaxGroup, op, ": a group of ", longest, " with zero points is above ",
                  kMaxGroup, ", where its int32 sum could overflow; pack the weight in groups");
  weight.zero = values_of<int32_t>(*zero);
  return weight;
}

void check_w_scale(const char* op, const Tensor& w_scale) {
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  STD_TORCH_CHECK(w_scale.dim() == 2, op, ": w_scale has shape ", shape_of(w_scale),
                  ", expected [N, G], a scale for each output feature and group of K");
}

Tensor int8_linear_groups(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                          std::optional<Tensor> w_zero, std::optional<Tensor> bias, Text activation,
                          ScalarType out_dtype) {
  constexpr const char* op = "int8_linear_groups";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  check_w_scale(op, w_scale);
  const Matrix size = matrix_of(op, "q", q);
  const PackedWeight w = packed_of(op, &packed, q, size.columns, w_scale.size(0));
  check_row_values(op, "scale", scale, size.rows, w.groups());
  check_row_values(op, "zero_point", zero_point, size.rows, w.groups());
  const GroupedWeight weight = grouped_weight_of(op, w, w_scale, w_zero);
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  const auto scales = row_values_of<float>(scale, size.rows, w.groups());
  const auto zeros = row_values_of<int32_t>(zero_point, size.rows, w.groups());
  Tensor y = empty_on_cpu(with_last(q, w.n), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int8_t* q = codes + first * w.k;
    const GroupedCodes rows(format_of_codes(kernels, w, q, count), w, q, scales.from(first),
                            zeros.from(first), count, w_zero.has_value());
    grouped_linear(kernels, rows, weight, to, first);
  });
  return y;
}

// The forward of a linear with gradients: x, its step and the transform are for these only
// (qfx/ops/groups_ste.py).
Tensor int8_linear_groups_ste(Tensor /*x*/, std::optional<Tensor> bias,
                              std::optional<Tensor> /*x_step*/, Tensor q, Tensor scale,
                              Tensor zero_point, Tensor packed, Tensor w_scale,
                              std::optional<Tensor> w_zero, int64_t /*w_group*/, int64_t /*bits*/,
                              bool /*symmetric*/, ScalarType out_dtype,
                              std::optional<Tensor> /*factor*/, int64_t /*rotation*/) {
  return int8_linear_groups(q, scale, zero_point, packed, w_scale, w_zero, bias, "none", out_dtype);
}

Tensor int8_linear_groups_dynamic(Tensor x, Tensor packed, Tensor w_scale,
                                  std::optional<Tensor> w_zero, std::optional<Tensor> bias,
                                  std::vector<int64_t> axes, int64_t group, int64_t bits,
                                  bool symmetric, Text activation, ScalarType out_dtype,
                                  std::optional<Tensor> factor, int64_t rotation) {
  constexpr const char* op = "int8_linear_groups_dynamic";
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  return grouped_linear_of_floats(
             op, x,
             {{packed, w_scale, bias, spec, std::move(activation), out_dtype, factor, rotation},
              w_zero,
              group},
             false)
      .y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_linear_groups", &int8_linear_groups>(m);
  implement<"int8_linear_groups_ste", &int8_linear_groups_ste>(m);
  implement<"int8_linear_groups_dynamic", &int8_linear_groups_dynamic>(m);
}

}  // namespace

GroupedLinearOfFloats grouped_linear_of_floats(const char* op, const Tensor& given,
                                               const DynamicGroups& how, bool with_sizes) {
  check_float(op, "x", given);
  const DynamicLinear& linear = how.linear;
  check_w_scale(op, linear.w_scale);
  const Matrix size = matrix_of(op, "x", given);
  Tensor packed = linear.packed;
  const PackedWeight w = packed_of(op, &packed, given, size.columns, linear.w_scale.size(0));
  check_cpu_transform(op, given, size, linear.factor, linear.rotation);
  check_group_of_x(op, how.group, w);
  const GroupedWeight weight = grouped_weight_of(op, w, linear.w_scale, how.w_zero);
  FloatOutput to = {nullptr, bias_of(op, linear.bias, w.n), activation_of(op, linear.activation),
                    dtype_of(op, linear.out_dtype), nullptr};
  const Tensor x = made_contiguous(given);
  const std::optional<Tensor> factor = made_contiguous(linear.factor);
  Tensor y = empty_on_cpu(with_last(x, w.n), linear.out_dtype);
  if (y.numel() == 0) return {y, x, nullptr};
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, linear.rotation);
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const Kernels& kernels = kernels_of(current_isa());
  thread_local Scratch scratch, of_sizes;
  double* sizes = with_sizes ? of_sizes.get<double>(size.rows) : nullptr;
  const CodeSpec& spec = linear.spec;
  TensorCode shared{};
  const bool per_tensor = spec.per_tensor && how.group == 0;
  if (per_tensor) {
    shared = choose_tensor_code(kernels, matrix, spec, scratch.get<float>(size.rows));
  }
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = per_tensor ? shared.part(first) : shared;
    const Format& format = format_for(kernels, operands_of(w, spec.bits < 8), count);
    const GroupedFloats rows(kernels, format, w, matrix.part(first, count), spec, how.group != 0,
                             per_tensor ? &part : nullptr, how.w_zero.has_value(),
                             sizes == nullptr ? nullptr : sizes + first);
    grouped_linear(kernels, rows, weight, to, first);
  });
  return {y, x, sizes};
}

}  // namespace qfx::cpu
