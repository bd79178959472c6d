#include "cpu/conv/depthwise.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/code.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kStepsPerPixel = 32;  // of a channel, in parallel.h's unit

Range range_of(int32_t most, uint32_t least) {
  const int32_t order = static_cast<int32_t>(least);
  const int32_t low = order < 0 ? order ^ 0x7fffffff : 0;
  const int32_t size = low < 0 ? order & 0x7fffffff : 0;
  return {std::max(size, most), low, most};
}

constexpr FloatPanel plain_panel() {
  FloatPanel panel = {};
  for (float& scale : panel.scale) scale = 1;
  return panel;
}

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
        quads_((of.w.out - 1) * of.w.stride + (taps_ - 1) * kQuadTaps + 1) {
    choose_codes(code);
  }

  void run() {
    thread_local Scratch lines, tile;
    const int64_t held = (of_.h.kernel - 1) * of_.h.dilation + 1, bytes = quads_ * kQuadBytes;
    uint8_t* memory = lines.get<uint8_t>(held * bytes);
    float* floats = tile.get<float>(of_.w.out * kLanes);
    std::vector<const uint8_t*> read(static_cast<size_t>(of_.h.kernel));
    int64_t next = -of_.h.before;  // the first line that is not ready
    for (int64_t o = 0; o < of_.h.out; ++o) {
      const int64_t begin = of_.h.input(o, 0), end = begin + held;
      for (next = std::max(next, begin); next < end; ++next) {
        fill(next, memory + slot(next, held) * bytes);
      }
      for (int64_t tap = 0; tap < of_.h.kernel; ++tap) {
        read[tap] = memory + slot(of_.h.input(o, tap), held) * bytes;
      }
      multiply(o, read.data(), floats);
    }
  }

 private:
  int64_t slot(int64_t line, int64_t held) const { return (line + of_.h.before) % held; }

  const float* pixels(int64_t line) const {
    return reinterpret_cast<const float*>(x_.at(b_, 0, line, 0)) + first_;
  }

  void choose_codes(const CodeSpec& spec) {
    LaneExtremes found = {};
    for (int64_t h = 0; h < of_.h.size; ++h) {
      const PixelLanes line = {pixels(h), x_.w, of_.w.size, lanes_};
      step_.range(&line, &found);
    }
    for (int n = 0; n < kLanes; ++n) {
      const RowCode code = code_of_range(range_of(found.most[n], found.least[n]), spec);
      codes_.inverse[n] = code.inverse;
      codes_.zero[n] = code.zero_point + kOffset;
      codes_.least[n] = kOffset + (code.finite ? code.qmin : 0);  // 0 where it is not (Q4)
      codes_.most[n] = kOffset + (code.finite ? code.qmax : 0);
      choose_column(n, code);
    }
    columns_.least = to_.activation == Activation::kRelu ? 0.f : -kInfinity;
  }

  void choose_column(int n, const RowCode& code) {
    const int64_t c = first_ + n, p = c / kPanel, at = c % kPanel;
    columns_.bias[n] = -0.f;  // changes nothing, not even -0
    if (n >= lanes_) return;
    columns_.first[n] = -(code.zero_point + kOffset) * w_.sums(p)[at];
    columns_.scale[n] = code.scale * w_.scales(p)[at];
    if (to_.bias != nullptr) columns_.bias[n] = to_.bias[c];
  }

  void fill(int64_t line, uint8_t* to) const {
    const bool inside = of_.h.inside(line);
    const PixelLanes from = {inside ? pixels(line) : nullptr, x_.w, inside ? of_.w.size : 0,
                             lanes_};
    const QuadLine quads = {of_.w.before, quads_, to};
    step_.quads(&from, &codes_, &quads);
  }

  // Whether the kernel of products finishes outputs.
  bool whole() const {
    const bool plain = to_.activation == Activation::kNone || to_.activation == Activation::kRelu;
    return plain && to_.dtype == Dtype::kFloat32;
  }

  void multiply(int64_t o, const uint8_t* const* lines, float* floats) const {
    const int64_t at = (b_ * of_.h.out + o) * of_.w.out * to_.row_of(w_) + first_;
    char* out = to_.data + at * to_.element();
    QuadProducts products = {lines,
                             of_.h.kernel,
                             taps_,
                             of_.w.stride,
                             of_.w.out,
                             w_.panel(first_ / kPanel),
                             &columns_,
                             whole() ? lanes_ : kLanes,
                             whole() ? reinterpret_cast<float*>(out) : floats,
                             whole() ? to_.row_of(w_) : kLanes};
    step_.products(&products);
    if (!whole()) finish(floats, out);
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

  static constexpr int32_t kOffset = 128;

  const Kernels& kernels_;
  const DepthwiseKernels& step_;
  const Image& x_;
  const Windows& of_;
  const PackedWeight& w_;
  const FloatOutput& to_;
  const int64_t b_, first_;
  const int lanes_;
  const int64_t taps_, quads_;
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
