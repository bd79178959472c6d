// int8_mm, linear, linear_ste, linear_dynamic on CUDA.
#include <algorithm>

#include "cuda/ops/lowbit_linear.h"
#include "cuda/ops/product.h"
#include "cuda/rows/dequantize.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

Tensor int8_mm(Tensor q, Tensor zero_point, Tensor weight, int64_t n) {
  constexpr const char* op = "int8_mm";
  const OnDevice device(op, q, zero_point, weight);
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  check_zero_points(op, "zero_point", zero_point, size.rows);
  const WeightLayout layout = weight_layout_of(op, weight, int8_rows(n), size.columns);
  zero_point = made_contiguous(zero_point);
  weight = made_aligned(weight);
  const PerRow<int32_t> zero = zero_points_of(zero_point);
  const PackedWeight w = packed_of(layout, weight);
  Tensor acc = empty_beside(q, with_last(q, n), ScalarType::Int);
  Output out = {};
  out.type = OutType::kIntegers;
  out.data = acc.mutable_data_ptr();
  const OwnedRows rows = rows_of_codes(q, size, device.stream());
  run_product(device, acc, {1, size.rows, n, w.layout.pitch()}, rows.rows, rows_of_weight(w),
              {zero, w.colsum, 0}, out);
  return acc;
}

// Codes of activations with what they stand for, a packed weight and a bias.
struct LinearOperands {
  Tensor q, scale, zero_point, weight;
  WeightLayoutArgument layout;
  std::optional<Tensor> bias;
};

// The values that codes stand for, float32. (Q5)
Tensor floats_of(LinearOperands o, const Matrix& size, Stream stream) {
  o.q = made_contiguous(o.q);
  o.scale = made_contiguous(o.scale);
  o.zero_point = made_contiguous(o.zero_point);
  Dequantize job = {};
  job.q = o.q.const_data_ptr();
  job.codes = true;
  job.rows = size.rows;
  job.columns = size.columns;
  job.scale = floats(o.scale);
  job.scale_step = stride_of(o.scale);
  job.zero_point = ints(o.zero_point);
  job.zero_step = stride_of(o.zero_point);
  job.rows_a_scale = std::max<int64_t>(size.rows, 1);
  Tensor x = empty_beside(o.q, with_last(o.q, size.columns), ScalarType::Float);
  dequantize(job, Activation::kNone, Dtype::kFloat32, x.mutable_data_ptr(), stream);
  return x;
}

// Operands on one device, as `op`: (E1), (E3) or (E4) by the layout of the weight.
Tensor linear_of_codes(const char* op, const OnDevice& device, LinearOperands o,
                       const std::string& activation, ScalarType out_dtype) {
  check_dtype(op, "q", o.q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", o.q);
  check_row_scales(op, "scale", o.scale, size.rows);
  check_zero_points(op, "zero_point", o.zero_point, size.rows);
  check_bias(op, o.bias, o.layout.n);
  Output out = {};
  out.activation = activation_of(op, activation);
  out.dtype = dtype_of(op, out_dtype);
  if (is_low_bit(o.layout)) {
    const Tensor x = floats_of(o, size, device.stream());
    return low_bit_linear(op, device, x, o.weight, o.layout, o.bias, activation, out_dtype);
  }
  const WeightLayout layout = weight_layout_of(op, o.weight, o.layout, size.columns);
  o.scale = made_contiguous(o.scale);
  o.zero_point = made_contiguous(o.zero_point);
  o.weight = made_aligned(o.weight);
  o.bias = made_contiguous(o.bias);
  const PerRow<int32_t> zero = zero_points_of(o.zero_point);
  const PackedWeight w = packed_of(layout, o.weight);
  out.row_scale = row_scales_of(o.scale);
  out.bias = bias_of(op, o.bias);
  Tensor y = empty_beside(o.q, with_last(o.q, layout.n), out_dtype);
  out.data = y.mutable_data_ptr();
  const OwnedRows rows = rows_of_codes(o.q, size, device.stream());
  const Sizes sizes = {1, size.rows, layout.n, layout.pitch()};
  if (o.layout.one_scale()) {
    out.col_scale = w.scale;
    run_product(device, y, sizes, rows.rows, rows_of_weight(w), {zero, w.colsum, 0}, out);
  } else {
    run_groups(device, y, sizes, rows.rows, w, zero, out);
  }
  return y;
}

Tensor linear(Tensor q, Tensor scale, Tensor zero_point, Tensor weight, std::vector<int64_t> layout,
              std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "linear";
  const OnDevice device(op, q, scale, zero_point, weight, bias);
  return linear_of_codes(op, device,
                         {q, scale, zero_point, weight, layout_argument_of(op, layout), bias},
                         activation, out_dtype);
}

// The forward of a linear with gradients: the rest is for these only (qfx/ops/ste.py).
Tensor linear_ste(Tensor /*x*/, std::optional<Tensor> /*w*/, std::optional<Tensor> bias,
                  std::optional<Tensor> /*x_step*/, std::optional<Tensor> /*w_step*/,
                  std::vector<Tensor> codes, Tensor weight, std::vector<int64_t> layout,
                  std::vector<int64_t> /*code*/, std::optional<Tensor> /*seed*/,
                  ScalarType out_dtype, std::optional<Tensor> /*factor*/) {
  STD_TORCH_CHECK(codes.size() == 3, "linear_ste: codes has ", codes.size(),
                  " tensors, expected 3: q, scale, zero_point");
  return linear(codes[0], codes[1], codes[2], weight, layout, bias, "none", out_dtype);
}

Tensor linear_dynamic(Tensor x, Tensor weight, std::vector<int64_t> given_layout,
                      std::optional<Tensor> bias, std::vector<int64_t> given_code, Text activation,
                      ScalarType out_dtype, std::optional<Tensor> factor) {
  constexpr const char* op = "linear_dynamic";
  const OnDevice device(op, x, weight, bias, factor);
  check_float(op, "x", x);
  const ActivationCode code = row_code_of(op, given_code);
  const WeightLayoutArgument layout = layout_argument_of(op, given_layout);
  const int64_t k = matrix_of(op, "x", x).columns;
  if (!is_low_bit(layout)) weight_layout_of(op, weight, layout, k);
  check_bias(op, bias, layout.n);
  activation_of(op, activation);
  dtype_of(op, out_dtype);
  const QuantizedRows codes =
      quantized_rows(op, x, code.spec, device.stream(), factor, code.rotation);
  return linear_of_codes(op, device, {codes.q, codes.scale, codes.zero_point, weight, layout, bias},
                         activation, out_dtype);
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_mm", &int8_mm>(m);
  implement<"linear", &linear>(m);
  implement<"linear_ste", &linear_ste>(m);
  implement<"linear_dynamic", &linear_dynamic>(m);
}

}  // namespace

}  // namespace qfx::cuda
