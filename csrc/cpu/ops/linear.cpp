// int8_mm, linear, linear_dynamic, linear_float and linear_ste on the CPU.
#include "cpu/ops/linear.h"

#include <utility>

#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

const int8_t* codes_of(const Tensor& q) { return static_cast<const int8_t*>(q.const_data_ptr()); }

Tensor int8_mm(Tensor q, Tensor zero_point, Tensor weight, int64_t n) {
  constexpr const char* op = "int8_mm";
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  check_zero_point(op, zero_point, size.rows);
  const Weight opened = whole_weight_of(op, &weight, q, size.columns, n);
  const PackedWeight& w = opened.whole;
  q = made_contiguous(q);
  zero_point = made_contiguous(zero_point);
  Tensor acc = empty_on_cpu(with_last(q, n), ScalarType::Int);
  if (acc.numel() == 0) return acc;  // of rows without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  const int64_t step = stride_of(zero_point);
  int32_t* out = static_cast<int32_t*>(acc.mutable_data_ptr());
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const CodeRows from(kernels, w, codes_of(q) + first * w.k, zeros, step, count);
    gemm(from, w, IntegerSink(w, from.rows, out + first * w.n));
  });
  return acc;
}

// The output of a linear, and where its kernels write it.
Tensor output_for(const Tensor& x, int64_t n, ScalarType dtype, FloatOutput* to) {
  Tensor y = empty_on_cpu(with_last(x, n), dtype);
  to->data = static_cast<char*>(y.mutable_data_ptr());
  to->bytes = y.numel() * to->element();
  return y;
}

FloatOutput output_of(const char* op, const std::optional<Tensor>& bias, int64_t n,
                      const std::string& activation, ScalarType dtype) {
  return {bias_of(op, bias, n), activation_of(op, activation), dtype_of(op, dtype), nullptr};
}

Tensor linear(Tensor q, Tensor scale, Tensor zero_point, Tensor weight, std::vector<int64_t> layout,
              std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "linear";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  const Matrix size = matrix_of(op, "q", q);
  const Weight w = weight_of(op, &weight, q, size.columns, layout);
  const int64_t groups = w.one_scale() ? 1 : w.shape().groups();
  check_row_values(op, "scale", scale, size.rows, groups);
  check_row_values(op, "zero_point", zero_point, size.rows, groups);
  FloatOutput to = output_of(op, bias, w.shape().n, activation, out_dtype);
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  const CodeMatrix from = {codes_of(q), size.rows, row_values_of<float>(scale, size.rows, groups),
                           row_values_of<int32_t>(zero_point, size.rows, groups)};
  Tensor y = output_for(q, w.shape().n, out_dtype, &to);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  linear_of_codes(kernels_of(current_isa()), from, {w, to});
  return y;
}

// The forward of a linear with gradients: x, w, the steps, the code and the factor are for these
// (qfx/ops/ste.py).
Tensor linear_ste(Tensor /*x*/, std::optional<Tensor> /*w*/, std::optional<Tensor> bias,
                  std::optional<Tensor> /*x_step*/, std::optional<Tensor> /*w_step*/,
                  std::vector<Tensor> codes, Tensor weight, std::vector<int64_t> layout,
                  std::vector<int64_t> /*code*/, std::optional<Tensor> /*seed*/,
                  ScalarType out_dtype, std::optional<Tensor> /*factor*/) {
  STD_TORCH_CHECK(codes.size() == 3, "linear_ste: codes has ", codes.size(),
                  " tensors, expected q, scale and zero_point");
  return linear(codes[0], codes[1], codes[2], weight, std::move(layout), bias, "none", out_dtype);
}

Tensor linear_dynamic(Tensor x, Tensor weight, std::vector<int64_t> layout,
                      std::optional<Tensor> bias, std::vector<int64_t> code, Text activation,
                      ScalarType out_dtype, std::optional<Tensor> factor) {
  constexpr const char* op = "linear_dynamic";
  const ActivationCode how = activation_code_of(op, code);
  return linear_of_floats(
             op, x,
             {weight, std::move(layout), bias, how, std::move(activation), out_dtype, factor},
             false)
      .y;
}

Tensor linear_float(Tensor x, Tensor weight, std::vector<int64_t> layout,
                    std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "linear_float";
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const Weight w = weight_of(op, &weight, x, size.columns, layout);
  STD_TORCH_CHECK(w.is_lowbit() || w.one_scale(), op,
                  ": the weight has groups or zero points and 8 bits, expected one scale for each "
                  "row, or 4 or 5 bits");
  FloatOutput to = output_of(op, bias, w.shape().n, activation, out_dtype);
  x = made_contiguous(x);
  Tensor y = output_for(x, w.shape().n, out_dtype, &to);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  const FloatMatrix matrix = float_matrix_of(op, x, size, std::nullopt, 0);
  linear_unquantized(kernels_of(current_isa()), matrix, {w, to});
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_mm", &int8_mm>(m);
  implement<"linear", &linear>(m);
  implement<"linear_ste", &linear_ste>(m);
  implement<"linear_dynamic", &linear_dynamic>(m);
  implement<"linear_float", &linear_float>(m);
}

}  // namespace

LinearOfFloats linear_of_floats(const char* op, const Tensor& given, const DynamicLinear& how,
                                bool with_sizes) {
  check_float(op, "x", given);
  const Matrix size = matrix_of(op, "x", given);
  Tensor weight = how.weight;
  const Weight w = weight_of(op, &weight, given, size.columns, how.layout);
  const auto& [spec, group, rotation] = how.code;
  check_cpu_transform(op, given, size, how.factor, rotation);
  if (w.one_scale()) {
    STD_TORCH_CHECK(group == 0, op, ": group=", group, ", but the weight was packed in one group");
  } else {
    check_group_of_x(op, group, w.shape());
  }
  FloatOutput to = output_of(op, how.bias, w.shape().n, how.activation, how.out_dtype);
  const Tensor x = made_contiguous(given);
  const std::optional<Tensor> factor = made_contiguous(how.factor);
  Tensor y = output_for(x, w.shape().n, how.out_dtype, &to);
  if (y.numel() == 0) return {y, x, nullptr};
  thread_local Scratch scratch;
  double* sizes = with_sizes ? scratch.get<double>(size.rows) : nullptr;
  const Linear all[] = {{w, to}};
  linears_of_floats(kernels_of(current_isa()),
                    {float_matrix_of(op, x, size, factor, rotation), spec, group}, all, nullptr,
                    sizes);
  return {y, x, sizes};
}

}  // namespace qfx::cpu
