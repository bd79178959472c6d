// Windows of an image: what the pixels of a line range over, and several windows at a time that
// become codes. (C2)
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "types.h"

namespace qfx::cpu {

inline constexpr int kWindowsAtOnce = 16;

// The range of each of many rows as two sortable integers, so that the range of their union is two
// maxima: most[i] of the greatest element and 0, and depth[i], the complement of that of the least
// element and 0.
struct RangeColumns {
  int32_t *most, *depth;
};

// Pixels [count][channels] that follow each other.
struct PixelRow {
  const float* x;
  int64_t count, channels;
  int rotation;  // of each pixel; 0 for none
};

inline constexpr int kPiece = 16;  // floats of a piece that is read by the fewest instructions

// Windows side by side. Each is `pieces` pieces of `length` floats; the next window reads all of
// them `step` floats further.
struct WindowReads {
  int64_t pieces, length, step, lines;
  const float* const* from;  // the pieces of the first window
  // Of each line of the image, how far what windows read ranges: kWindowsAtOnce numbers, of which
  // those beyond the last window may be anything.
  const int32_t *const *most, *const *depth;
};

// What windows become: codes q[r * stride + i], their scales and zero points.
struct WindowCodes {
  int8_t* q;
  int64_t stride;
  float* scale;
  int32_t* zero_point;
};

struct WindowKernels {
  // out = R x of each pixel, and its range. `out` may be x.
  void (*rotate_pixels)(const PixelRow* from, float* out, const RangeColumns* ranges);
  // to[i] = the greatest of from[i * stride + tap * dilation], of `taps` taps.
  void (*reach)(const int32_t* from, int64_t count, int64_t stride, int64_t taps, int64_t dilation,
                int32_t* to);
  // Chooses a code for each of `count` windows, at most kWindowsAtOnce, and quantizes them.
  void (*quantize)(const WindowReads* from, int64_t count, const CodeSpec* spec,
                   const WindowCodes* to);
};

}  // namespace qfx::cpu
