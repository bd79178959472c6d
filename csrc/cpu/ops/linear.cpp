// int8_mm, linear, linear_dynamic, linears, linear_float and linear_ste on the CPU.
#include "cpu/ops/linear.h"

#include <utility>
#include <vector>

#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr size_t kLayout = 5;  // numbers of the layout of one weight

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

// The weight of a linear that quantizes x itself, with a scale for each `group` elements of K or
// all (0). Makes it contiguous.
Weight weight_of_floats(const char* op, Tensor* weight, const Tensor& x, int64_t k,
                        const std::vector<int64_t>& layout, int64_t group) {
  const Weight w = weight_of(op, weight, x, k, layout);
  check_group_of_floats(op, w, group);
  return w;
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

// What `bias_of` gave in memory that its next call takes, kept in `copies`.
const float* kept_bias(const float* values, const void* bias, int64_t n,
                       std::vector<std::vector<float>>* copies) {
  if (values == nullptr || values == bias) return values;
  return copies->emplace_back(values, values + n).data();
}

// linear_dynamic by each weight; x is quantized once, and threads share the panels of all.
std::vector<Tensor> linears(Tensor given, std::vector<Tensor> weight, std::vector<int64_t> layout,
                            std::vector<std::optional<Tensor>> bias, std::vector<int64_t> code,
                            std::vector<Text> activation, ScalarType out_dtype,
                            std::optional<Tensor> factor) {
  constexpr const char* op = "linears";
  const size_t count = weight.size();
  STD_TORCH_CHECK(
      layout.size() == kLayout * count && bias.size() == count && activation.size() == count, op,
      ": ", count, " weights, but ", layout.size(), " numbers of layouts, ", bias.size(),
      " biases and ", activation.size(), " activations, expected five numbers for each weight, a ",
      "bias or none and an activation");
  const auto& [spec, group, rotation] = activation_code_of(op, code);
  check_float(op, "x", given);
  const Matrix size = matrix_of(op, "x", given);
  check_cpu_transform(op, given, size, factor, rotation);
  std::vector<Weight> opened;
  std::vector<FloatOutput> outputs;
  std::vector<std::vector<float>> copies;
  for (size_t i = 0; i < count; ++i) {
    const auto begin = layout.begin() + kLayout * i;
    const std::vector<int64_t> own(begin, begin + kLayout);
    opened.push_back(weight_of_floats(op, &weight[i], given, size.columns, own, group));
    const int64_t n = opened[i].shape().n;
    outputs.push_back(output_of(op, bias[i], n, activation[i], out_dtype));
    const void* given_bias = bias[i] ? bias[i]->const_data_ptr() : nullptr;
    outputs[i].bias = kept_bias(outputs[i].bias, given_bias, n, &copies);
  }
  const Tensor x = made_contiguous(given);
  factor = made_contiguous(factor);
  std::vector<Tensor> results;
  std::vector<Linear> all;
  for (size_t i = 0; i < count; ++i) {
    results.push_back(output_for(x, opened[i].shape().n, out_dtype, &outputs[i]));
    if (results[i].numel() != 0) all.push_back({opened[i], outputs[i]});
  }
  if (all.empty()) return results;  // of rows without number, perhaps
  linears_of_floats(kernels_of(current_isa()),
                    {float_matrix_of(op, x, size, factor, rotation), spec, group}, all);
  return results;
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
  implement<"linears", &linears>(m);
  implement<"linear_float", &linear_float>(m);
}

}  // namespace

void linears_at(const char* op, const LinearsAt& call, std::span<const LinearWeightAt> weights) {
  const auto& [spec, group, rotation] = call.code;
  STD_TORCH_CHECK(is_rotation(rotation), op, ": rotation=", rotation, ", expected 0, 16 or 64");
  std::vector<Weight> opened;
  std::vector<Linear> all;
  std::vector<std::vector<float>> copies;
  opened.reserve(weights.size());
  char* y = static_cast<char*>(call.y);
  for (const LinearWeightAt& each : weights) {
    opened.push_back(weight_at(op, each.weight, each.weight_bytes, call.k, each.layout));
    check_group_of_floats(op, opened.back(), group);
    const int64_t n = opened.back().shape().n;
    const float* bias = each.biases(n);
    if (weights.size() > 1) bias = kept_bias(bias, each.bias, n, &copies);
    FloatOutput to = {bias, each.activation, call.out_dtype, y};
    to.bytes = call.rows * n * to.element();
    y += to.bytes;
    if (to.bytes != 0) all.push_back({opened.back(), to});
  }
  if (all.empty()) return;  // of rows without number, perhaps
  const Transform transform = {call.factor, static_cast<int>(rotation)};
  const FloatMatrix x = {call.x, call.dtype, call.rows, call.k, call.k, transform};
  linears_of_floats(kernels_of(current_isa()), {x, spec, group}, all);
}

LinearOfFloats linear_of_floats(const char* op, const Tensor& given, const DynamicLinear& how,
                                bool with_sizes) {
  check_float(op, "x", given);
  const Matrix size = matrix_of(op, "x", given);
  Tensor weight = how.weight;
  const auto& [spec, group, rotation] = how.code;
  const Weight w = weight_of_floats(op, &weight, given, size.columns, how.layout, group);
  check_cpu_transform(op, given, size, how.factor, rotation);
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
