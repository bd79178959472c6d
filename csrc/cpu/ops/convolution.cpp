// im2col and conv_dynamic on the CPU.
#include "cpu/conv/convolution.h"

#include <vector>

#include "cpu/conv/im2col.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/convolution.h"
#include "cpu/ops/row_values.h"
#include "cpu/ops/weight_stack.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

Tensor im2col_of(Tensor x, std::vector<int64_t> kernel, std::vector<int64_t> stride,
                 std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  constexpr const char* op = "im2col";
  check_float(op, "x", x);
  const size_t axes = kernel.size();
  const Windows of = windows_of(op, x, {kernel, stride, padding, dilation}, 1);
  Tensor rows = empty_on_cpu(shape_for(of, axes, of.k()), x.scalar_type());
  if (rows.numel() == 0) return rows;
  im2col(image_of(op, x), of, 0, of.rows(), static_cast<char*>(rows.mutable_data_ptr()));
  return rows;
}

// A packed weight [bytes], or one for each group of channels [G, bytes].
class OpenedWeights {
 public:
  OpenedWeights(const char* op, const Tensor& weight, const Tensor& x, int64_t k,
                const std::vector<int64_t>& layout, int64_t group)
      : weight_(weight) {
    if (weight.dim() == 1) {
      all_.push_back(weight_of(op, &weight_, x, k, layout));
      check_group_of_floats(op, all_[0], group);
      return;
    }
    stack_.emplace(op, "weight", weight, std::nullopt, k, layout);
    for (int64_t g = 0; g < weight.size(0); ++g) all_.push_back(stack_->open(g, group));
  }

  const std::vector<Weight>& all() const { return all_; }

 private:
  Tensor weight_;
  std::optional<WeightStack> stack_;
  std::vector<Weight> all_;
};

void check_residual(const char* op, const std::optional<Tensor>& residual,
                    const std::vector<int64_t>& shape, ScalarType dtype) {
  if (!residual) return;
  check_dtype(op, "residual", *residual, {dtype});
  STD_TORCH_CHECK(shape_of(*residual) == text_of(shape), op, ": residual has shape ",
                  shape_of(*residual), ", but the output has shape ", text_of(shape));
}

// `to`: of the first group. Each group has the next channels of x and y.
void convolve(const Image& x, const Windows& of, const WindowCode& code,
              const std::vector<Weight>& weights, FloatOutput to) {
  const auto groups = static_cast<int64_t>(weights.size());
  const int64_t n = weights[0].shape().n;
  to.stride = n * groups;
  for (int64_t g = 0; g < groups; ++g) {
    convolution(kernels_of(current_isa()), x.channels_from(g * of.channels), of, code,
                {weights[g], to});
    to.data += n * to.element();
    if (to.bias != nullptr) to.bias += n;
    if (to.residual != nullptr) to.residual += n * to.element();
  }
}

Tensor conv_dynamic(Tensor x, Tensor weight, std::vector<int64_t> layout,
                    std::optional<Tensor> bias, std::vector<int64_t> kernel,
                    std::vector<int64_t> stride, std::vector<int64_t> padding,
                    std::vector<int64_t> dilation, std::vector<int64_t> code, Text activation,
                    ScalarType out_dtype, std::optional<Tensor> factor,
                    std::optional<Tensor> residual) {
  constexpr const char* op = "conv_dynamic";
  check_float(op, "x", x);
  check_dtype(op, "weight", weight, {ScalarType::Char});
  const int64_t groups = weight.dim() == 2 ? weight.size(0) : 1;
  const Windows of = windows_of(op, x, {kernel, stride, padding, dilation}, groups);
  const auto& [spec, group, rotation] = activation_code_of(op, code);
  const int64_t n = layout_argument_of(op, layout).n;
  check_cpu_transform(op, x, {of.rows(), of.k()}, factor, rotation);
  const float* biases = bias_of(op, bias, n * groups);
  const Activation act = activation_of(op, activation);
  const Dtype dtype = dtype_of(op, out_dtype);
  const std::vector<int64_t> shape = shape_for(of, kernel.size(), n * groups);
  check_residual(op, residual, shape, out_dtype);
  OpenedWeights weights(op, weight, x, of.k(), layout, group);
  factor = made_contiguous(factor);
  residual = made_contiguous(residual);
  Tensor y = empty_on_cpu(shape, out_dtype);
  if (y.numel() == 0) return y;
  FloatOutput to = {biases, act, dtype, static_cast<char*>(y.mutable_data_ptr())};
  to.residual = residual ? static_cast<const char*>(residual->const_data_ptr()) : nullptr;
  to.bytes = y.numel() * size_of(dtype);
  convolve(image_of(op, x), of, {spec, group, transform_of(factor, rotation)}, weights.all(), to);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"im2col", &im2col_of>(m);
  implement<"conv_dynamic", &conv_dynamic>(m);
}

}  // namespace

void convolution_at(const char* op, const ConvolutionAt& call) {
  const auto& [spec, group, rotation] = call.code;
  STD_TORCH_CHECK(is_rotation(rotation), op, ": rotation=", rotation, ", expected 0, 16 or 64");
  const LinearWeightAt& w = call.weight;
  std::vector<Weight> weights;
  for (int64_t g = 0; g < call.groups; ++g) {
    const int8_t* at = w.weight + g * w.weight_bytes;
    weights.push_back(weight_at(op, at, w.weight_bytes, call.of.k(), w.layout));
    check_group_of_floats(op, weights.back(), group);
  }
  const int64_t channels = w.layout.n * call.groups;
  FloatOutput to = {w.biases(channels), w.activation, call.out_dtype, static_cast<char*>(call.y)};
  to.residual = static_cast<const char*>(call.residual);
  to.bytes = call.of.rows() * channels * to.element();
  if (to.bytes == 0) return;
  const Transform transform = {call.factor, static_cast<int>(rotation)};
  convolve(call.x, call.of, {spec, group, transform}, weights, to);
}

}  // namespace qfx::cpu
