// int8_linear_groups and int8_linear_groups_ste on CUDA: a linear whose weight has a scale for each
// group of K.
#include <algorithm>

#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

template <typename T>
PerGroup<T> values_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
}

void check_group_zeros(const char* op, const Tensor& zero, const Tensor& scale, int64_t longest) {
  // An int32 sum of this many products of two codes less their zero points, both in [-255, 255].
  constexpr int64_t kMaxGroup = 33025;
  check_dtype(op, "w_zero", zero, {ScalarType::Int});
  STD_TORCH_CHECK(shape_of(zero) == shape_of(scale), op, ": w_zero has shape ", shape_of(zero),
                  ", expected ", shape_of(scale), " as w_scale has");
  STD_TORCH_CHECK(longest <= kMaxGroup, op, ": a group of ", longest, " with zero points is above ",
                  kMaxGroup, ", where its int32 sum could overflow; pack the weight in groups");
}

// Of a weight packed without groups all of K is one.
int64_t group_of(const WeightLayout& layout) {
  return layout.groups() == 0 ? WeightLayout::of(0, layout.k, kMaxK).group : layout.group;
}

GroupTerms terms_of(const PackedWeight& w) {
  GroupTerms terms = {};
  const int64_t groups = w.layout.groups();
  terms.group = group_of(w.layout);
  terms.colsum =
      groups == 0 ? PerGroup<int32_t>{w.colsum, 1, 0} : PerGroup<int32_t>{w.group_sums, groups, 1};
  return terms;
}

Tensor int8_linear_groups(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                          std::optional<Tensor> w_zero, std::optional<Tensor> bias, Text activation,
                          ScalarType out_dtype) {
  constexpr const char* op = "int8_linear_groups";
  const OnDevice device(op, q, scale, zero_point, packed, w_scale, w_zero, bias);
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  const Matrix size = matrix_of(op, "q", q);
  check_row_scales(op, "scale", scale, size.rows);
  check_zero_points(op, "zero_point", zero_point, size.rows);
  const WeightLayout layout = grouped_layout_of(op, packed, q, size.columns, w_scale);
  if (w_zero.has_value()) {
    check_group_zeros(op, *w_zero, w_scale, std::min(group_of(layout), size.columns));
  }
  check_bias(op, bias, layout.n);
  Output out = {};
  out.activation = activation_of(op, activation);
  out.dtype = dtype_of(op, out_dtype);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  packed = made_aligned(packed);
  bias = made_contiguous(bias);
  out.row_scale = row_scales_of(scale);
  out.bias = bias_of(op, bias);
  const PerRow<int32_t> zero = zero_points_of(zero_point);
  const PackedWeight w = packed_of(layout, packed);
  GroupTerms terms = terms_of(w);
  terms.zero = zero;
  terms.scale = values_of<float>(w_scale);
  if (w_zero.has_value()) terms.w_zero = values_of<int32_t>(*w_zero);
  Tensor y = empty_beside(q, with_last(q, w.layout.n), out_dtype);
  out.data = y.mutable_data_ptr();
  if (y.numel() == 0) return y;
  const HeldRows rows = rows_of_codes(q, size, device.stream());
  Tensor sums =
      empty_beside(q, {w_zero.has_value() ? w_scale.size(1) * size.rows : 0}, ScalarType::Int);
  terms.row_sums = data_of<int32_t>(sums);
  if (sums.numel() > 0) {
    sum_groups_of_rows(rows.rows, zero, size.rows, size.columns, terms.group,
                       data_of<int32_t>(sums), device.stream());
  }
  const TileShape shape = size.rows <= 16 ? TileShape::k16x64 : TileShape::k64x64;
  multiply_groups({1, size.rows, w.layout.n, w.layout.pitch()}, rows.rows, rows_of_weight(w), terms,
                  out, shape, device.stream());
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

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_linear_groups", &int8_linear_groups>(m);
  implement<"int8_linear_groups_ste", &int8_linear_groups_ste>(m);
}

}  // namespace
}  // namespace qfx::cuda
