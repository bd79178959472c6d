#include "cpu/conv/depthwise.h"

#include <algorithm>
#include <limits>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kStepsPerPixel = 32;  // of a channel, in parallel.h's unit

// Channels [first, first + lanes) of an image.
class Lanes {
 public:
  Lanes(const Kernels& kernels, const Image& x, const Windows& of, const CodeSpec& code,
        const PackedWeight& w, const FloatOutput& to, int64_t b, int64_t first)
      : kernels_(kernels),
        step_(*kernels.row->depthwise),
        x_(x),
        of_(of),
        w_(w),
        to_(to),
        b_(b),
        first_(first),
        lanes_(static_cast<int>(std::min<int64_t>(kLanes, w.n - first))),
        taps_(stored_taps(of.w.kernel) / kQuadTaps),
        every_(taps_ == 1 || kQuadTaps % of.w.stride == 0 ? of.w.stride : 1),
        steps_{of.w.stride / every_, kQuadTaps / every_},
        quads_((of.w.out - 1) * steps_.per_output + (taps_ - 1) * steps_.per_tap + 1) {
    choose_codes(code);
  }

  void run() {
    thread_local Scratch lines, pointers, tile;
    // Two lines of outputs read each line of the image at once.
    const int64_t most = of_.h.stride == 1 && of_.h.dilation == 1 && of_.h.out > 1 ? 2 : 1;
    const int64_t held = (of_.h.kernel - 1) * of_.h.dilation + most, bytes = quads_ * kQuadBytes;
    uint8_t* memory = lines.get<uint8_t>(held * bytes);
    const uint8_t** read = pointers.get<const uint8_t*>(of_.h.kernel + 1);
    float* floats = tile.get<float>(most * of_.w.out * kPanel);
    int64_t next = -of_.h.before;  // the first line that is not ready
    for (int64_t o = 0; o < of_.h.out;) {
      const int64_t outputs = std::min(most, of_.h.out - o), begin = of_.h.input(o, 0);
      const int64_t end = of_.h.input(o + outputs - 1, of_.h.kernel - 1) + 1;
      for (next = std::max(next, begin); next < end; ++next) {
        fill(next, memory + slot(next, held) * bytes);
      }
      for (int64_t tap = 0; tap < of_.h.kernel + outputs - 1; ++tap) {
        read[tap] = memory + slot(of_.h.input(o, tap), held) * bytes;
      }
      multiply(o, outputs, read, floats);
      o += outputs;
    }
  }

 private:
  int64_t slot(int64_t line, int64_t held) const { return (line + of_.h.before) % held; }

  const float* pixels(int64_t line) const {
    return reinterpret_cast<const float*>(x_.at(b_, 0, line, 0)) + first_;
  }

  void choose_codes(const CodeSpec& spec) {
    LaneExtremes found = {};
    const bool dense = x_.h == of_.w.size * x_.w;  // all lines are one
    const int64_t count = dense ? of_.h.size * of_.w.size : of_.w.size;
    for (int64_t h = 0; h < (dense ? 1 : of_.h.size); ++h) {
      const PixelLanes line = {pixels(h), x_.w, count, lanes_};
      step_.range(&line, &found);
    }
    step_.codes(&found, &spec, &codes_);
    const int64_t p = first_ / kPanel, at = first_ % kPanel;
    for (int n = 0; n < kLanes; ++n) {
      columns_.first[n] = -codes_.zero[n] * w_.sums(p)[at + n];
      columns_.scale[n] = codes_.scale[n] * w_.scales(p)[at + n];
      columns_.bias[n] = -0.f;  // changes nothing, not even -0
    }
    if (to_.bias != nullptr) std::copy_n(to_.bias + first_, lanes_, columns_.bias);
    columns_.least = to_.activation == Activation::kRelu ? 0.f : -kInfinity;
  }

  void fill(int64_t line, uint8_t* to) const {
    const bool inside = of_.h.inside(line);
    const PixelLanes from = {inside ? pixels(line) : nullptr, x_.w, inside ? of_.w.size : 0,
                             lanes_};
    const QuadLine quads = {of_.w.before, every_, quads_, to};
    step_.quads(&from, &codes_, &quads);
  }

  // Whether the kernel of products finishes outputs.
  bool is_whole() const {
    const bool plain = to_.activation == Activation::kNone || to_.activation == Activation::kRelu;
    return plain && to_.dtype == Dtype::kFloat32;
  }

  void multiply(int64_t o, int64_t outputs, const uint8_t* const* lines, float* floats) const {
    const int64_t step = to_.row_of(w_), line = of_.w.out * step;
    char* out = to_.data + ((b_ * of_.h.out + o) * line + first_) * to_.element();
    const bool whole = is_whole();
    float* first = whole ? reinterpret_cast<float*>(out) : floats;
    float* second = first + (whole ? line : of_.w.out * kPanel);
    QuadProducts products = {lines,
                             of_.h.kernel,
                             taps_,
                             of_.w.out,
                             steps_,
                             w_.panel(first_ / kPanel) + first_ % kPanel * kQuadTaps,
                             &columns_,
                             whole ? lanes_ : kLanes,
                             first,
                             outputs > 1 ? second : nullptr,
                             whole ? step : kPanel};
    step_.products(&products);
    if (whole) return;
    for (int64_t i = 0; i < outputs; ++i) {
      finish(floats + i * of_.w.out * kPanel, out + i * line * to_.element());
    }
  }

  void finish(const float* floats, char* out) const {
    static constexpr float kOne = 1.f;
    static constexpr FloatPanel kPlain = plain_panel();
    const FloatEpilogueArgs args = {floats,
                                    static_cast<int>(of_.w.out),
                                    lanes_,
                                    &kOne,
                                    0,
                                    &kPlain,
                                    to_.activation,
                                    to_.dtype,
                                    out,
                                    to_.row_of(w_)};
    kernels_.sums->finish_floats(&args);
  }

  const Kernels& kernels_;
  const DepthwiseKernels& step_;
  const Image& x_;
  const Windows& of_;
  const PackedWeight& w_;
  const FloatOutput& to_;
  const int64_t b_, first_;
  const int lanes_;
  const int64_t taps_;
  const int64_t every_;  // pixels from one quad to the next
  const QuadSteps steps_;
  const int64_t quads_;
  LaneCodes codes_ = {};
  LaneColumns columns_ = {};
};

}  // namespace

void depthwise(const Kernels& kernels, const Image& x, const Windows& of, const CodeSpec& code,
               const PackedWeight& w, const FloatOutput& to) {
  const int64_t each = (w.n + kLanes - 1) / kLanes;
  const int64_t pixels = of.h.size * of.w.size + of.h.out * of.w.out * (of.h.kernel + 1);
  parallel(of.batch * each, of.batch * w.n * pixels * kStepsPerPixel,
           [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i) {
               Lanes(kernels, x, of, code, w, to, i / each, i % each * kLanes).run();
             }
           });
}

}  // namespace qfx::cpu
