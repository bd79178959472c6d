#include "cpu/conv/im2col.h"

#include <cstring>

#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 8;  // in parallel.h's unit

template <typename Element>
void copy_pixel(const char* from, int64_t step, int64_t channels, Element* to) {
  const auto* pixel = reinterpret_cast<const Element*>(from);
  if (step == 1) {
    std::memcpy(to, pixel, channels * sizeof(Element));
  } else {
    for (int64_t c = 0; c < channels; ++c) to[c] = pixel[c * step];
  }
}

template <typename Element>
void copy_row(const Image& x, const Windows& of, int64_t row, Element* to) {
  const OutputPixel at = output_pixel(of, row);
  for (int64_t i = 0; i < of.d.kernel * of.h.kernel; ++i) {
    const int64_t d = of.d.input(at.d, i / of.h.kernel), h = of.h.input(at.h, i % of.h.kernel);
    const bool outside = !of.d.inside(d) || !of.h.inside(h);
    for (int64_t tap = 0; tap < of.w.kernel; ++tap, to += of.channels) {
      const int64_t w = of.w.input(at.w, tap);
      if (outside || !of.w.inside(w)) {
        std::memset(to, 0, of.channels * sizeof(Element));
      } else {
        copy_pixel(x.at(at.b, d, h, w), x.c, of.channels, to);
      }
    }
  }
}

template <typename Element>
void copy_rows(const Image& x, const Windows& of, int64_t first, int64_t count, Element* out) {
  const int64_t k = of.k();
  parallel(count, count * k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) copy_row(x, of, first + m, out + m * k);
  });
}

}  // namespace

void im2col(const Image& x, const Windows& of, int64_t first, int64_t count, char* out) {
  if (x.element() == 4) return copy_rows(x, of, first, count, reinterpret_cast<uint32_t*>(out));
  copy_rows(x, of, first, count, reinterpret_cast<uint16_t*>(out));
}

}  // namespace qfx::cpu
