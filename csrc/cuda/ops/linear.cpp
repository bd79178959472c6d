// int8_mm, int8_linear, int8_linear_ste, int8_linear_dynamic on CUDA.
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

Tensor int8_mm(Tensor q, Tensor zero_point, Tensor packed, int64_t n) {
  constexpr const char* op = "int8_mm";
  const OnDevice device(op, q, zero_point, packed);
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  check_zero_points(op, "zero_point", zero_point, size.rows);
  const WeightLayout layout = layout_of(op, packed, q, size.columns, n);
  zero_point = made_contiguous(zero_point);
  packed = made_aligned(packed);
  const PerRow<int32_t> zero = zero_points_of(zero_point);
  const PackedWeight w = packed_of(layout, packed);
  Tensor acc = empty_beside(q, with_last(q, n), ScalarType::Int);
  Output out = {};
  out.type = OutType::kIntegers;
  out.data = acc.mutable_data_ptr();
  const HeldRows rows = rows_of_codes(q, size, device.stream());
  run_product(device, acc, {1, size.rows, n, w.layout.pitch()}, rows.rows, rows_of_weight(w),
              {zero, w.colsum, 0}, out);
  return acc;
}

Tensor int8_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                   std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_linear";
  const OnDevice device(op, q, scale, zero_point, packed, w_scale, bias);
  return linear_of_codes(op, device, {q, scale, zero_point, packed, w_scale, bias}, activation,
                         out_dtype);
}

// The forward of a linear that trains: x, w, the steps and the transform are for gradients only
// (qfx/ops/ste.py).
Tensor int8_linear_ste(Tensor /*x*/, std::optional<Tensor> /*w*/, std::optional<Tensor> bias,
                       std::optional<Tensor> /*x_step*/, std::optional<Tensor> /*w_step*/, Tensor q,
                       Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                       std::vector<int64_t> /*w_axes*/, int64_t /*bits*/, int64_t /*w_bits*/,
                       bool /*symmetric*/, std::optional<Tensor> /*seed*/, ScalarType out_dtype,
                       std::optional<Tensor> /*factor*/, int64_t /*rotation*/) {
  return int8_linear(q, scale, zero_point, packed, w_scale, bias, "none", out_dtype);
}

Tensor int8_linear_dynamic(Tensor x, Tensor packed, Tensor w_scale, std::optional<Tensor> bias,
                           std::vector<int64_t> axes, int64_t bits, bool symmetric, Text activation,
                           ScalarType out_dtype, std::optional<Tensor> factor, int64_t rotation) {
  constexpr const char* op = "int8_linear_dynamic";
  const OnDevice device(op, x, packed, w_scale, bias, factor);
  check_float(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const int64_t n = w_scale.numel();
  check_col_scales(op, "w_scale", w_scale, n);
  layout_of(op, packed, x, matrix_of(op, "x", x).columns, n);
  check_bias(op, bias, n);
  activation_of(op, activation);
  dtype_of(op, out_dtype);
  const QuantizedRows codes = quantized_rows(op, x, spec, device.stream(), factor, rotation);
  return linear_of_codes(op, device,
                         {codes.q, codes.scale, codes.zero_point, packed, w_scale, bias},
                         activation, out_dtype);
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_mm", &int8_mm>(m);
  implement<"int8_linear", &int8_linear>(m);
  implement<"int8_linear_ste", &int8_linear_ste>(m);
  implement<"int8_linear_dynamic", &int8_linear_dynamic>(m);
}

}  // namespace
}  // namespace qfx::cuda
