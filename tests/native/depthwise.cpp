// Depthwise convolutions (C5) on one thread and on several, against the reference's kernels, with
// images, weights and outputs beside pages that fault.
#include "cpu/conv/depthwise.h"

#include "cpu/gemm/weight.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr int64_t kThreads[] = {1, 3};

struct Shape {
  int64_t batch, channels;
  WindowAxis h, w;
};

// {size, kernel, stride, dilation, before, out}
constexpr WindowAxis kOne = {1, 1, 1, 1, 0, 1};
constexpr Shape kShapes[] = {
    {1, 32, {7, 3, 1, 1, 1, 7}, {14, 3, 1, 1, 1, 14}},
    {2, 33, {9, 3, 2, 1, 1, 5}, {9, 3, 2, 1, 1, 5}},
    {1, 47, {5, 5, 1, 1, 2, 5}, {23, 5, 1, 1, 2, 23}},
    {1, 64, {6, 7, 1, 2, 6, 6}, {17, 7, 2, 1, 3, 9}},
    {3, 5, kOne, {40, 9, 1, 1, 4, 40}},
    {1, 16, {4, 4, 3, 1, 0, 1}, {8, 4, 3, 1, 0, 2}},
    {1, 1, {1, 3, 1, 1, 1, 1}, {1, 3, 1, 1, 1, 1}},
    {1, 40, {3, 2, 1, 1, 0, 2}, {3, 1, 1, 1, 5, 13}},
    {0, 32, {7, 3, 1, 1, 1, 7}, {14, 3, 1, 1, 1, 14}},
};

class DepthwiseTest {
 public:
  explicit DepthwiseTest(const Kernels& kernels)
      : kernels_(kernels), subject_(std::string("depthwise__") + kernels.isa) {}

  void run(const Shape& s, bool symmetric, Activation activation, Place place) {
    const Windows of = {s.batch, s.channels, kOne, s.h, s.w};
    const int64_t k = s.h.kernel * cpu::stored_taps(s.w.kernel);
    subject_.begin(std::to_string(s.channels) + " channels, " + std::to_string(of.taps()) +
                   " taps, " + name_of(place));
    const std::vector<float> image = values(s.batch * s.channels * s.h.size * s.w.size);
    const int64_t line = s.w.size * s.channels, all = line * s.h.size;
    const Image x = {reinterpret_cast<const char*>(x_.copy(image, place)),
                     Dtype::kFloat32,
                     all,
                     1,
                     all,
                     line,
                     s.channels};
    const std::vector<float> scale = values(s.channels), bias = values(s.channels);
    std::vector<int8_t> codes;
    for (int64_t i = 0; i < s.channels * k; ++i) codes.push_back(static_cast<int8_t>(hash(i)));
    const int64_t size = cpu::packed_size(s.channels, k);
    int8_t* packed = weight_.get<int8_t>(size, Place::kBeforeGuard);
    cpu::pack({codes.data(), s.channels, k, k, 1, scale.data()}, {}, packed);
    Weight weight;
    if (const std::string fault = open_weight(packed, size, &weight); !fault.empty()) {
      throw Failure(fault);
    }
    const CodeSpec code = {8, symmetric, false};
    const int64_t count = of.rows() * s.channels;
    std::vector<float> expected(static_cast<size_t>(count));
    cpu::test_threads = 1;
    depthwise(kernels_ref(), x, of, code, weight.whole,
              output(bias.data(), activation, expected.data()));
    for (int64_t threads : kThreads) {
      cpu::test_threads = threads;
      float* y = y_.get<float>(count, place);
      depthwise(kernels_, x, of, code, weight.whole, output(bias.data(), activation, y));
      subject_.same_floats(Dtype::kFloat32, y, expected.data(), count);
    }
    cpu::test_threads = 1;
  }

  void passed() const { subject_.passed(); }

 private:
  static std::vector<float> values(int64_t count) {
    std::vector<float> made;
    for (int64_t i = 0; i < count; ++i) {
      made.push_back(static_cast<float>(hash(i) % 2001) * 0x1p-10f - 1.f);
    }
    return made;
  }

  static FloatOutput output(const float* bias, Activation activation, float* to) {
    return {bias, activation, Dtype::kFloat32, reinterpret_cast<char*>(to)};
  }

  const Kernels& kernels_;
  Subject subject_;
  Pages x_, weight_, y_;
};

}  // namespace

void check_depthwise(const Kernels& kernels) {
  DepthwiseTest test(kernels);
  for (const Shape& shape : kShapes) {
    for (const bool symmetric : {false, true}) {
      for (const Activation activation :
           {Activation::kNone, Activation::kRelu, Activation::kSilu}) {
        for (const Place place : kPlaces) test.run(shape, symmetric, activation, place);
      }
    }
  }
  test.passed();
}

}  // namespace qfx::test
