// Depthwise convolutions: channels of an image side by side, half a panel at a time, so that the
// codes of the lines under a kernel fit into the first cache. (C5)
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "types.h"

namespace qfx::cpu {

inline constexpr int kLanes = kPanel / 2;  // channels that are worked on side by side
inline constexpr int kQuadTaps = 4;        // neighbouring pixels whose codes are multiplied at once
inline constexpr int kQuadBytes = kLanes * kQuadTaps;
inline constexpr int kTapsBytes = kPanel * kQuadTaps;  // of the weights of a panel's quad

// The first `lanes` channels of `count` pixels that lie `step` floats apart.
struct PixelLanes {
  const float* x;
  int64_t step, count;
  int lanes;
};

// The range of each channel, as that of a row; see Extremes in tables/code.h.
struct LaneExtremes {
  int32_t most[kLanes];
  uint32_t least[kLanes];
};

inline constexpr int kLaneOffset = 128;  // is added to codes, which become unsigned

// How each channel becomes codes: clamp(rne(x * inverse) + zero, least, most), the codes (Q3) plus
// kLaneOffset.
struct LaneCodes {
  float scale[kLanes], inverse[kLanes];
  int32_t zero[kLanes], least[kLanes], most[kLanes];
  bool clamped;  // whether a code of a pixel can lie outside
};

// A line of pixels between `before` pixels of zeros and as many as fill `quads`; quad j,
// [kLanes][kQuadTaps], holds pixels j * every to j * every + 3 of all of these.
struct QuadLine {
  int64_t before, every, quads;
  uint8_t* out;
};

// What becomes of the sums of each channel: max(float(first + sum) * scale + bias, least).
struct LaneColumns {
  int32_t first[kLanes];
  float scale[kLanes], bias[kLanes];
  float least;
};

// Which quads make an output: those at output * per_output + tap * per_tap.
struct QuadSteps {
  int64_t per_output, per_tap;
};

// out[o * step + n] of `count` outputs and the first `lanes` channels, of each the products of
// `taps` quads of `rows` lines by weights[row][tap], which lie kTapsBytes apart. `second`, unless
// it is null: the outputs of the lines that begin one later.
struct QuadProducts {
  const uint8_t* const* lines;
  int64_t rows, taps, count;
  QuadSteps steps;
  const int8_t* weights;
  const LaneColumns* columns;
  int lanes;
  float *out, *second;
  int64_t step;
};

struct DepthwiseKernels {
  // Widens the extremes by these pixels.
  void (*range)(const PixelLanes* from, LaneExtremes* extremes);
  void (*codes)(const LaneExtremes* extremes, const CodeSpec* spec, LaneCodes* codes);
  void (*quads)(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to);
  void (*products)(const QuadProducts* of);
};

}  // namespace qfx::cpu
