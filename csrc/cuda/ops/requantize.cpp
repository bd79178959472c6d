// int8_linear_requantize on CUDA: a linear whose output is codes for a following int8 linear.
#include <tuple>

#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> int8_linear_requantize(Tensor q, Tensor scale, Tensor zero_point,
                                                          Tensor packed, Tensor w_scale,
                                                          std::optional<Tensor> bias,
                                                          Text activation, Tensor out_scale,
                                                          std::optional<Tensor> out_zero_point,
                                                          int64_t bits, bool symmetric) {
  constexpr const char* op = "int8_linear_requantize";
  const OnDevice device(op, q, scale, zero_point, packed, w_scale, bias, out_scale, out_zero_point);
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  const int64_t n = w_scale.numel();
  check_row_scales(op, "scale", scale, size.rows);
  check_col_scales(op, "w_scale", w_scale, n);
  check_zero_points(op, "zero_point", zero_point, size.rows);
  check_row_scales(op, "out_scale", out_scale, size.rows);
  if (out_zero_point.has_value()) {
    check_zero_points(op, "zero_point", *out_zero_point, size.rows);
  }
  const WeightLayout layout = layout_of(op, packed, q, size.columns, n);
  check_bias(op, bias, n);
  Output out = {};
  out.type = OutType::kCodes;
  out.codes.spec = code_spec_of(op, {1}, bits, symmetric);
  out.activation = activation_of(op, activation);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  packed = made_aligned(packed);
  w_scale = made_contiguous(w_scale);
  bias = made_contiguous(bias);
  out_scale = made_contiguous(out_scale);
  out_zero_point = made_contiguous(out_zero_point);
  out.row_scale = row_scales_of(scale);
  out.col_scale = floats(w_scale);
  const PerRow<int32_t> zero = zero_points_of(zero_point);
  out.codes.scale = row_scales_of(out_scale);
  if (out_zero_point.has_value()) out.codes.zero_point = zero_points_of(*out_zero_point);
  const PackedWeight w = packed_of(layout, packed);
  out.bias = bias_of(op, bias);
  Tensor out_q = empty_beside(q, with_last(q, n), ScalarType::Char);
  Tensor row_scale = empty_beside(q, with_last(q, 1), ScalarType::Float);
  Tensor row_zero = empty_beside(q, with_last(q, 1), ScalarType::Int);
  Tensor faults = zeros_beside(q, {size.rows}, ScalarType::Int);
  out.data = out_q.mutable_data_ptr();
  out.codes.faults = data_of<int32_t>(faults);
  const HeldRows rows = rows_of_codes(q, size, device.stream());
  run_product(device, q, {1, size.rows, n, w.layout.pitch()}, rows.rows, rows_of_weight(w),
              {zero, w.colsum, 0}, out);
  settle_codes(out.codes, size.rows, n, data_of<int8_t>(out_q), data_of<float>(row_scale),
               data_of<int32_t>(row_zero), device.stream());
  return {out_q, row_scale, row_zero};
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_linear_requantize", &int8_linear_requantize>(m);
}

}  // namespace
}  // namespace qfx::cuda
