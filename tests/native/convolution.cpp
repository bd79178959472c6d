// Convolutions on one thread and on several, against linears of their windows (C2), and windows
// against their definition (C1), with images beside pages that fault.
#include "cpu/conv/convolution.h"

#include <memory>

#include "cpu/conv/im2col.h"
#include "cpu/gemm/weight.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr int64_t kThreads[] = {1, 3};

struct Shape {
  int64_t batch, channels, n;
  WindowAxis d, h, w;
  int rotation, group;
};

// {size, kernel, stride, dilation, before, out}
constexpr WindowAxis kOne = {1, 1, 1, 1, 0, 1};
constexpr Shape kShapes[] = {
    {1, 64, 33, kOne, {5, 3, 1, 1, 1, 5}, {7, 3, 1, 1, 1, 7}, 64, 0},
    {2, 32, 40, kOne, {9, 3, 2, 1, 0, 4}, {40, 3, 2, 1, 1, 20}, 16, 0},
    {1, 3, 64, kOne, {16, 7, 2, 1, 3, 8}, {16, 7, 2, 1, 3, 8}, 64, 0},
    {1, 48, 32, kOne, kOne, {300, 5, 1, 3, 6, 300}, 16, 0},
    {2, 16, 5, {4, 3, 1, 1, 1, 4}, {3, 2, 1, 2, 0, 1}, {5, 3, 1, 1, 2, 7}, 0, 0},
    {1, 16, 16, kOne, {12, 3, 1, 1, 1, 12}, {37, 3, 1, 1, 1, 37}, 16, 0},
    {1, 80, 48, kOne, {4, 3, 1, 1, 1, 4}, {9, 3, 1, 2, 2, 9}, 16, 0},
    {1, 17, 32, kOne, {1, 3, 1, 1, 1, 1}, {1, 3, 1, 1, 1, 1}, 16, 0},
    {1, 32, 33, kOne, {3, 2, 1, 1, 0, 2}, {18, 2, 1, 1, 0, 17}, 0, 64},
    {0, 32, 33, kOne, {3, 2, 1, 1, 0, 2}, {18, 2, 1, 1, 0, 17}, 0, 0},
};

float value_of(int64_t i) { return static_cast<float>(hash(i) % 2001) * 0x1p-10f - 1.f; }

std::vector<float> values(int64_t count, int64_t from) {
  std::vector<float> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(value_of(i + from));
  return made;
}

class ConvolutionTest {
 public:
  explicit ConvolutionTest(const Kernels& kernels)
      : kernels_(kernels), subject_(std::string("convolution__") + kernels.isa) {}

  void run(const Shape& s, bool channels_last, Place place) {
    const Windows of = {s.batch, s.channels, s.d, s.h, s.w};
    const int64_t pixels = s.d.size * s.h.size * s.w.size, line = s.w.size;
    const std::vector<float> image = values(s.batch * s.channels * pixels, 1);
    const int64_t c = channels_last ? 1 : pixels, w = channels_last ? s.channels : 1;
    const float* data = x_.copy(image, place);
    const Image x = {reinterpret_cast<const char*>(data),
                     Dtype::kFloat32,
                     s.channels * pixels,
                     c,
                     w * line * s.h.size,
                     w * line,
                     w};
    subject_.begin(std::to_string(s.channels) + " channels, " + std::to_string(of.taps()) +
                   " taps, " + (channels_last ? "channels last, " : "") + name_of(place));
    const std::vector<float> rows = windows_of(of, image, x);
    float* copied = rows_.get<float>(of.rows() * of.k(), place);
    im2col(x, of, 0, of.rows(), reinterpret_cast<char*>(copied));
    subject_.same(copied, rows.data(), of.rows() * of.k());
    compare(s, of, x, copied, place);
  }

  void passed() const { subject_.passed(); }

 private:
  // (C1), element by element.
  static std::vector<float> windows_of(const Windows& of, const std::vector<float>& image,
                                       const Image& x) {
    std::vector<float> rows;
    for (int64_t m = 0; m < of.rows(); ++m) {
      const OutputPixel at = output_pixel(of, m);
      for (int64_t tap = 0; tap < of.taps(); ++tap) {
        const int64_t tap_w = tap % of.w.kernel, tap_h = tap / of.w.kernel % of.h.kernel;
        const int64_t d = of.d.input(at.d, tap / of.w.kernel / of.h.kernel);
        const int64_t h = of.h.input(at.h, tap_h), w = of.w.input(at.w, tap_w);
        const bool inside = of.d.inside(d) && of.h.inside(h) && of.w.inside(w);
        for (int64_t c = 0; c < of.channels; ++c) {
          const int64_t i = at.b * x.b + c * x.c + d * x.d + h * x.h + w * x.w;
          rows.push_back(inside ? image[static_cast<size_t>(i)] : 0.f);
        }
      }
    }
    return rows;
  }

  void compare(const Shape& s, const Windows& of, const Image& x, const float* rows, Place place) {
    const int64_t k = of.k(), count = of.rows() * s.n;
    std::vector<int8_t> codes;
    for (int64_t i = 0; i < s.n * k; ++i) codes.push_back(static_cast<int8_t>(hash(i + 7)));
    const PackedKind kind = {s.group, s.group != 0, false};
    const std::vector<float> scale = values(s.n * kind.scales(k), 3), bias = values(s.n, 5);
    const int64_t size = packed_size(s.n, k, kind);
    int8_t* packed = weight_.get<int8_t>(size, Place::kBeforeGuard);
    pack({codes.data(), s.n, k, k, 1, scale.data()}, kind, packed);
    Weight weight;
    if (const std::string fault = open_weight(packed, size, &weight); !fault.empty()) {
      throw Failure(fault);
    }
    const WindowCode code = {{8, false, false}, s.group, {nullptr, s.rotation}};
    std::vector<float> expected(static_cast<size_t>(count));
    cpu::test_threads = 1;
    const cpu::Linear all[] = {{weight, output(bias.data(), expected.data())}};
    const FloatMatrix matrix = {rows, Dtype::kFloat32, of.rows(), k, k, code.transform};
    if (of.rows() > 0) linears_of_floats(kernels_, {matrix, code.spec, code.group}, all);
    for (int64_t threads : kThreads) {
      cpu::test_threads = threads;
      float* y = y_.get<float>(count, place);
      convolution(kernels_, x, of, code, {weight, output(bias.data(), y)});
      subject_.same(y, expected.data(), count);
    }
    cpu::test_threads = 1;
  }

  static FloatOutput output(const float* bias, float* to) {
    return {bias, Activation::kRelu, Dtype::kFloat32, reinterpret_cast<char*>(to)};
  }

  const Kernels& kernels_;
  Subject subject_;
  Pages x_, rows_, weight_, y_;
};

}  // namespace

void check_convolutions(const Kernels& kernels) {
  ConvolutionTest test(kernels);
  for (const Shape& shape : kShapes) {
    for (const bool channels_last : {false, true}) {
      for (const Place place : kPlaces) test.run(shape, channels_last, place);
    }
  }
  test.passed();
}

}  // namespace qfx::test
