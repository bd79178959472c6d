// The windows that a convolution multiplies, over up to three axes of an image.
#pragma once

#include <cstdint>

#include "types.h"

namespace qfx::cpu {

// One axis: an output reads `kernel` inputs, `dilation` apart, the first `before` the image.
struct WindowAxis {
  int64_t size = 1, kernel = 1, stride = 1, dilation = 1, before = 0, out = 1;

  // The input that tap `tap` of output `o` reads; outside of the image it is 0.
  int64_t input(int64_t o, int64_t tap) const { return o * stride - before + tap * dilation; }
  bool inside(int64_t i) const { return i >= 0 && i < size; }
  // Whether output o reads input o and nothing else.
  bool is_identity() const { return kernel == 1 && stride == 1 && before == 0 && out == size; }
};

// Depth, lines and columns. Row m of the windows is output (b, d, h, w), the last one fastest, and
// its elements are (tap of d, of h, of w, channel).
struct Windows {
  int64_t batch, channels;
  WindowAxis d, h, w;

  int64_t taps() const { return d.kernel * h.kernel * w.kernel; }
  int64_t k() const { return taps() * channels; }
  int64_t rows() const { return batch * d.out * h.out * w.out; }
  bool are_pixels() const { return d.is_identity() && h.is_identity() && w.is_identity(); }
};

// An image of any layout, strides in elements.
struct Image {
  const char* data;
  Dtype dtype;
  int64_t b, c, d, h, w;

  int64_t element() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
  const char* at(int64_t ib, int64_t id, int64_t ih, int64_t iw) const {
    return data + (ib * b + id * d + ih * h + iw * w) * element();
  }
  // Whether the channels of a pixel are neighbours, and pixels are `w` elements apart.
  bool is_matrix(const Windows& of) const {
    const bool next_line = of.h.size == 1 || h == of.w.size * w;
    const bool next_plane = of.d.size == 1 || d == of.h.size * of.w.size * w;
    const bool next_image = of.batch == 1 || b == of.d.size * of.h.size * of.w.size * w;
    return (c == 1 || of.channels == 1) && next_line && next_plane && next_image;
  }
  // Channels from `first` on.
  Image channels_from(int64_t first) const {
    return {data + first * c * element(), dtype, b, c, d, h, w};
  }
};

// An output pixel.
struct OutputPixel {
  int64_t b, d, h, w;
};

inline OutputPixel output_pixel(const Windows& of, int64_t row) {
  const int64_t line = row / of.w.out, plane = line / of.h.out;
  return {plane / of.d.out, plane % of.d.out, line % of.h.out, row % of.w.out};
}

}  // namespace qfx::cpu
