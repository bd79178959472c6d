// linear_requantize on CUDA: a linear whose output is codes for a following linear.
#include <tuple>

#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> linear_requantize(Tensor q, Tensor scale, Tensor zero_point,
                                                     Tensor weight, std::vector<int64_t> given,
                                                     std::optional<Tensor> bias, Text activation,
                                                     Tensor out_scale,
                                                     std::optional<Tensor> out_zero_point,
                                                     std::vector<int64_t> out_code) {
  constexpr const char* op = "linear_requantize";
  const OnDevice device(op, q, scale, zero_point, weight, bias, out_scale, out_zero_point);
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  const WeightLayoutArgument layout = layout_argument_of(op, given);
  check_one_scale(op, layout);
  const int64_t n = layout.n;
  check_row_scales(op, "scale", scale, size.rows);
  check_zero_points(op, "zero_point", zero_point, size.rows);
  check_row_scales(op, "out_scale", out_scale, size.rows);
  if (out_zero_point.has_value()) {
    check_zero_points(op, "zero_point", *out_zero_point, size.rows);
  }
  const WeightLayout bytes = weight_layout_of(op, weight, layout, size.columns);
  check_bias(op, bias, n);
  Output out = {};
  out.type = OutType::kCodes;
  out.codes.spec = row_code_of(op, out_code).spec;
  out.activation = activation_of(op, activation);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  weight = made_aligned(weight);
  bias = made_contiguous(bias);
  out_scale = made_contiguous(out_scale);
  out_zero_point = made_contiguous(out_zero_point);
  out.row_scale = row_scales_of(scale);
  const PerRow<int32_t> zero = zero_points_of(zero_point);
  out.codes.scale = row_scales_of(out_scale);
  if (out_zero_point.has_value()) out.codes.zero_point = zero_points_of(*out_zero_point);
  const PackedWeight w = packed_of(bytes, weight);
  out.col_scale = w.scale;
  out.bias = bias_of(op, bias);
  Tensor out_q = empty_beside(q, with_last(q, n), ScalarType::Char);
  Tensor row_scale = empty_beside(q, with_last(q, 1), ScalarType::Float);
  Tensor row_zero = empty_beside(q, with_last(q, 1), ScalarType::Int);
  Tensor faults = zeros_beside(q, {size.rows}, ScalarType::Int);
  out.data = out_q.mutable_data_ptr();
  out.codes.faults = data_of<int32_t>(faults);
  const OwnedRows rows = rows_of_codes(q, size, device.stream());
  run_product(device, q, {1, size.rows, n, w.layout.pitch()}, rows.rows, rows_of_weight(w),
              {zero, w.colsum, 0}, out);
  settle_codes(out.codes, size.rows, n, data_of<int8_t>(out_q), data_of<float>(row_scale),
               data_of<int32_t>(row_zero), device.stream());
  return {out_q, row_scale, row_zero};
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"linear_requantize", &linear_requantize>(m);
}

}  // namespace
}  // namespace qfx::cuda
