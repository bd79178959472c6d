// im2col, conv_dynamic and conv_depthwise on the CPU.
#include "cpu/conv/convolution.h"

#include <array>
#include <vector>

#include "cpu/conv/depthwise.h"
#include "cpu/conv/im2col.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "cpu/ops/row_values.h"
#include "cpu/ops/weight_stack.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr size_t kMostAxes = 3;

// How windows lie in an image, as operators are told.
struct WindowArguments {
  std::vector<int64_t> kernel, stride, padding, dilation;
};

void check_each(const char* op, const char* what, const std::vector<int64_t>& values, size_t count,
                int64_t least) {
  bool fits = values.size() == count;
  for (const int64_t value : values) fits = fits && value >= least;
  STD_TORCH_CHECK(fits, op, ": ", what, " is [", text_of(values), "], expected ", count,
                  " numbers of at least ", least);
}

// Outputs of an axis of `size` inputs.
int64_t outputs_of(const WindowAxis& axis, int64_t after) {
  const int64_t room = axis.size + axis.before + after - (axis.kernel - 1) * axis.dilation - 1;
  return room < 0 ? 0 : room / axis.stride + 1;
}

// x [B, C, sizes], in groups of channels.
Windows windows_of(const char* op, const Tensor& x, const WindowArguments& how, int64_t groups) {
  const size_t count = how.kernel.size();
  STD_TORCH_CHECK(count >= 1 && count <= kMostAxes, op, ": kernel has ", count,
                  " sizes, expected one for each of 1 to 3 axes");
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(count) + 2, op, ": x has shape ", shape_of(x),
                  ", expected a batch, channels and ", count, " axes");
  check_each(op, "kernel", how.kernel, count, 1);
  check_each(op, "stride", how.stride, count, 1);
  check_each(op, "padding", how.padding, 2 * count, 0);
  check_each(op, "dilation", how.dilation, count, 1);
  STD_TORCH_CHECK(groups > 0 && x.size(1) % groups == 0, op, ": x has ", x.size(1),
                  " channels, which ", groups, " groups do not divide");
  Windows of = {x.size(0), x.size(1) / groups, {}, {}, {}};
  const std::array<WindowAxis*, kMostAxes> axes = {&of.w, &of.h, &of.d};
  for (size_t i = 0; i < count; ++i) {
    const size_t from = count - 1 - i;
    WindowAxis& axis = *axes[i];
    axis = {x.size(static_cast<int64_t>(from) + 2),
            how.kernel[from],
            how.stride[from],
            how.dilation[from],
            how.padding[2 * from],
            1};
    axis.out = outputs_of(axis, how.padding[2 * from + 1]);
  }
  return of;
}

Image image_of(const char* op, const Tensor& x) {
  const int64_t axes = x.dim() - 2;
  const auto step = [&](int64_t back) { return back < axes ? x.stride(x.dim() - 1 - back) : 0; };
  return {static_cast<const char*>(x.const_data_ptr()),
          dtype_of(op, x.scalar_type()),
          x.stride(0),
          x.stride(1),
          step(2),
          step(1),
          step(0)};
}

// [B, outputs, last].
std::vector<int64_t> shape_for(const Windows& of, size_t axes, int64_t last) {
  std::vector<int64_t> shape = {of.batch};
  if (axes > 2) shape.push_back(of.d.out);
  if (axes > 1) shape.push_back(of.h.out);
  shape.push_back(of.w.out);
  shape.push_back(last);
  return shape;
}

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

  const Weight& of_group(int64_t g) const { return all_[g]; }

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
  const char* added = residual ? static_cast<const char*>(residual->const_data_ptr()) : nullptr;
  const Image image = image_of(op, x);
  const WindowCode how = {spec, group, transform_of(factor, rotation)};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * n * size_of(dtype);
    FloatOutput to = {biases == nullptr ? nullptr : biases + g * n, act, dtype,
                      static_cast<char*>(y.mutable_data_ptr()) + at};
    to.residual = added == nullptr ? nullptr : added + at;
    to.bytes = y.numel() * size_of(dtype);
    to.stride = n * groups;
    convolution(kernels_of(current_isa()), image.channels_from(g * of.channels), of, how,
                {weights.of_group(g), to});
  }
  return y;
}

// An image in float32 with its channels last: x itself, or a copy of one image after the other.
class FloatImages {
 public:
  FloatImages(const Kernels& kernels, const Image& x, const Windows& of)
      : kernels_(kernels), x_(x), one_(pixels_of(of)) {}

  bool in_place() const { return x_.c == 1 && x_.dtype == Dtype::kFloat32; }

  // Image b of them, as the only one.
  Image image(int64_t b) {
    const int64_t channels = one_.channels, count = one_.rows() * channels;
    char* copy = copy_.get<char>(count * x_.element());
    im2col({x_.at(b, 0, 0, 0), x_.dtype, 0, x_.c, x_.d, x_.h, x_.w}, one_, 0, one_.rows(), copy);
    if (x_.dtype != Dtype::kFloat32) {
      float* wide = wide_.get<float>(count);
      kernels_.row->widen(copy, x_.dtype, count, wide);
      copy = reinterpret_cast<char*>(wide);
    }
    return {copy, Dtype::kFloat32, 0, 1, 0, one_.w.size * channels, channels};
  }

 private:
  static Windows pixels_of(const Windows& of) {
    const auto all = [](const WindowAxis& axis) {
      return WindowAxis{axis.size, 1, 1, 1, 0, axis.size};
    };
    return {1, of.channels, all(of.d), all(of.h), all(of.w)};
  }

  const Kernels& kernels_;
  const Image& x_;
  const Windows one_;
  Scratch copy_, wide_;
};

Tensor conv_depthwise(Tensor x, Tensor weight, std::vector<int64_t> layout,
                      std::optional<Tensor> bias, std::vector<int64_t> kernel,
                      std::vector<int64_t> stride, std::vector<int64_t> padding,
                      std::vector<int64_t> dilation, std::vector<int64_t> code, Text activation,
                      ScalarType out_dtype) {
  constexpr const char* op = "conv_depthwise";
  check_float(op, "x", x);
  check_dtype(op, "weight", weight, {ScalarType::Char});
  const Windows of = windows_of(op, x, {kernel, stride, padding, dilation}, 1);
  STD_TORCH_CHECK(kernel.size() <= 2 && dilation.back() == 1, op, ": kernel [", text_of(kernel),
                  "] with dilation [", text_of(dilation),
                  "], expected one or two axes and no dilation of the last one");
  const auto& [spec, group, rotation] = activation_code_of(op, code);
  STD_TORCH_CHECK(group == 0 && rotation == 0 && !spec.per_tensor, op, ": code is [", text_of(code),
                  "], expected one scale for each channel of an image and no rotation");
  const int64_t n = layout_argument_of(op, layout).n, c = x.size(1);
  STD_TORCH_CHECK(n == c, op, ": the weight has n=", n, ", but x has ", c, " channels");
  const int64_t k = of.h.kernel * stored_taps(of.w.kernel);
  const Weight opened = weight_of(op, &weight, x, k, layout);
  STD_TORCH_CHECK(!opened.is_lowbit() && opened.one_scale(), op,
                  ": the weight has groups, expected one scale for each channel");
  const FloatOutput how = {bias_of(op, bias, n), activation_of(op, activation),
                           dtype_of(op, out_dtype), nullptr};
  Tensor y = empty_on_cpu(shape_for(of, kernel.size(), n), out_dtype);
  if (y.numel() == 0) return y;
  FloatOutput to = how;
  to.data = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  const Image image = image_of(op, x);
  FloatImages images(kernels, image, of);
  if (images.in_place()) {
    depthwise(kernels, image, of, spec, opened.whole, to);
    return y;
  }
  Windows one = of;
  one.batch = 1;
  for (int64_t b = 0; b < of.batch; ++b, to.data += one.rows() * n * to.element()) {
    depthwise(kernels, images.image(b), one, spec, opened.whole, to);
  }
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"im2col", &im2col_of>(m);
  implement<"conv_dynamic", &conv_dynamic>(m);
  implement<"conv_depthwise", &conv_depthwise>(m);
}

}  // namespace
}  // namespace qfx::cpu
