// conv_depthwise on the CPU.
#include "cpu/conv/depthwise.h"

#include <vector>

#include "cpu/conv/im2col.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/convolution.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// An image in float32 with its channels last: x itself, or a copy of one image after the other.
class FloatImages {
 public:
  FloatImages(const Kernels& kernels, const Image& x, const Windows& of)
      : kernels_(kernels), x_(x), one_(pixels_of(of)) {}

  bool in_place() const { return x_.c == 1 && x_.dtype == Dtype::kFloat32; }

  // Image b of them, as the only one.
  Image image(int64_t b) {
    const int64_t channels = one_.channels, count = one_.rows() * channels;
    const char* pixels = x_.at(b, 0, 0, 0);
    const Image only = {pixels, x_.dtype, 0, x_.c, x_.d, x_.h, x_.w};
    if (!only.is_matrix(one_) || x_.w != channels) {
      char* copy = copy_.get<char>(count * x_.element());
      im2col(only, one_, 0, one_.rows(), copy);
      pixels = copy;
    }
    if (x_.dtype != Dtype::kFloat32) {
      float* wide = wide_.get<float>(count);
      kernels_.row->widen(pixels, x_.dtype, count, wide);
      pixels = reinterpret_cast<const char*>(wide);
    }
    return {pixels, Dtype::kFloat32, 0, 1, 0, one_.w.size * channels, channels};
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

void check_code(const char* op, const ActivationCode& code) {
  STD_TORCH_CHECK(code.group == 0 && code.rotation == 0 && !code.spec.per_tensor, op,
                  ": code has group=", code.group, ", rotation=", code.rotation, " and ",
                  code.spec.per_tensor ? "one scale for all" : "a scale for each row",
                  ", expected one scale for each channel of an image and no rotation");
}

void check_windows(const char* op, const Windows& of, int64_t n) {
  STD_TORCH_CHECK(of.d.is_identity() && of.w.dilation == 1, op, ": the kernel is ", of.d.kernel,
                  "x", of.h.kernel, "x", of.w.kernel, " with dilation ", of.w.dilation,
                  " of the last axis, expected one or two axes and no dilation of the last one");
  STD_TORCH_CHECK(n == of.channels, op, ": the weight has n=", n, ", but x has ", of.channels,
                  " channels");
}

void check_weight(const char* op, const Weight& w) {
  STD_TORCH_CHECK(!w.is_lowbit() && w.one_scale(), op,
                  ": the weight has groups, expected one scale for each channel");
}

int64_t stored_k(const Windows& of) { return of.h.kernel * stored_taps(of.w.kernel); }

void convolve(const Image& x, const Windows& of, const CodeSpec& spec, const PackedWeight& w,
              FloatOutput to) {
  const Kernels& kernels = kernels_of(current_isa());
  FloatImages images(kernels, x, of);
  if (images.in_place()) return depthwise(kernels, x, of, spec, w, to);
  Windows one = of;
  one.batch = 1;
  for (int64_t b = 0; b < of.batch; ++b, to.data += one.rows() * w.n * to.element()) {
    depthwise(kernels, images.image(b), one, spec, w, to);
  }
}

Tensor conv_depthwise(Tensor x, Tensor weight, std::vector<int64_t> layout,
                      std::optional<Tensor> bias, std::vector<int64_t> kernel,
                      std::vector<int64_t> stride, std::vector<int64_t> padding,
                      std::vector<int64_t> dilation, std::vector<int64_t> code, Text activation,
                      ScalarType out_dtype) {
  constexpr const char* op = "conv_depthwise";
  check_float(op, "x", x);
  check_dtype(op, "weight", weight, {ScalarType::Char});
  const Windows of = windows_of(op, x, {kernel, stride, padding, dilation}, 1);
  const ActivationCode how = activation_code_of(op, code);
  check_code(op, how);
  const int64_t n = layout_argument_of(op, layout).n;
  check_windows(op, of, n);
  const Weight opened = weight_of(op, &weight, x, stored_k(of), layout);
  check_weight(op, opened);
  FloatOutput to = {bias_of(op, bias, n), activation_of(op, activation), dtype_of(op, out_dtype),
                    nullptr};
  Tensor y = empty_on_cpu(shape_for(of, kernel.size(), n), out_dtype);
  if (y.numel() == 0) return y;
  to.data = static_cast<char*>(y.mutable_data_ptr());
  convolve(image_of(op, x), of, how.spec, opened.whole, to);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"conv_depthwise", &conv_depthwise>(m); }

}  // namespace

void depthwise_at(const char* op, const ConvolutionAt& call) {
  const LinearWeightAt& w = call.weight;
  const int64_t n = w.layout.n;
  check_code(op, call.code);
  check_windows(op, call.of, n);
  const Weight opened = weight_at(op, w.weight, w.weight_bytes, stored_k(call.of), w.layout);
  check_weight(op, opened);
  if (call.of.rows() * n == 0) return;
  const FloatOutput to = {w.biases(n), w.activation, call.out_dtype, static_cast<char*>(call.y)};
  convolve(call.x, call.of, call.code.spec, opened.whole, to);
}

}  // namespace qfx::cpu
