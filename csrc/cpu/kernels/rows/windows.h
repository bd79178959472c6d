// Windows of an image become codes, several at a time. (C2)
#pragma once

#include "cpu/kernels/rows/quantize.h"
#include "cpu/kernels/rows/rotate.h"
#include "cpu/kernels/tables/code.h"
#include "cpu/kernels/tables/windows.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX2__) && defined(__FMA__)
// Pixels four at a time, whose ranges are found side by side; returns how many.
template <int kBlock>
inline int64_t rotate_fours(const PixelRow& from, float* out, const RangeColumns& ranges) {
  const int64_t channels = from.channels;
  int64_t i = 0;
  for (; i + 4 <= from.count; i += 4) {
    wide::Integers most[4], depth[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t at = (i + j) * channels;
      const WideExtremes found =
          wide::rotate_vectors<kBlock, false, false>(from.x + at, channels, nullptr, out + at);
      most[j] = found.most;
      depth[j] = found.negated_least();
    }
    const __m128i deepest = _mm_max_epi32(wide::greatest_of_four(depth), _mm_set1_epi32(~0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ranges.most + i), wide::greatest_of_four(most));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ranges.depth + i), deepest);
  }
  return i;
}
#else
template <int kBlock>
inline int64_t rotate_fours(const PixelRow&, float*, const RangeColumns&) {
  return 0;
}
#endif

inline void rotate_pixels(const PixelRow* from, float* out, const RangeColumns* ranges) {
  const auto [x, count, channels, rotation] = *from;
  int64_t i = 0;
  if (rotation == 16) i = rotate_fours<16>(*from, out, *ranges);
  if (rotation == 64) i = rotate_fours<64>(*from, out, *ranges);
  const Transform transform = {nullptr, rotation};
  for (; i < count; ++i) {
    const int64_t at = i * channels;
    const Range range = rotate_any<false>(x + at, channels, transform, out + at);
    ranges->most[i] = range.high;
    ranges->depth[i] = ~range.low;
  }
}

inline void reach_of_windows(const int32_t* from, int64_t count, int64_t stride, int64_t taps,
                             int64_t dilation, int32_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
  for (int64_t tap = 1; tap < taps; ++tap) {
    from += dilation;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int32_t found = from[i * stride];
        to[i] = found > to[i] ? found : to[i];
      }
    }
  }
}

// A code for each of some windows, as code_of_range chooses it.
struct CodesOfWindows {
  float scale[kWindowsAtOnce], inverse[kWindowsAtOnce];
  int32_t zero[kWindowsAtOnce], finite[kWindowsAtOnce];

  CodesOfWindows(const WindowReads& from, const CodeSpec& spec) {
    int32_t most[kWindowsAtOnce], depth[kWindowsAtOnce];
    for (int r = 0; r < kWindowsAtOnce; ++r) most[r] = 0, depth[r] = ~0;
    for (int64_t i = 0; i < from.lines; ++i) {
      const int32_t *high = from.most[i], *low = from.depth[i];
      for (int r = 0; r < kWindowsAtOnce; ++r) {
        most[r] = high[r] > most[r] ? high[r] : most[r];
        depth[r] = low[r] > depth[r] ? low[r] : depth[r];
      }
    }
    for (int r = 0; r < kWindowsAtOnce; ++r) {
      const int32_t magnitude = most[r] > depth[r] ? most[r] : depth[r];
      const RowCode code = code_of_range({magnitude, ~depth[r], most[r]}, spec);
      scale[r] = code.scale;
      inverse[r] = code.inverse;
      zero[r] = code.zero_point;
      finite[r] = code.finite;
    }
  }
};

inline void quantize_windows(const WindowReads* from, int64_t count, const CodeSpec* spec,
                             const WindowCodes* to) {
  const CodesOfWindows codes(*from, *spec);
  const int32_t qmax = (1 << (spec->bits - 1)) - 1, qmin = spec->symmetric ? -qmax : -qmax - 1;
  for (int64_t r = 0; r < count; ++r) {
    const RowCode code = {codes.scale[r], codes.inverse[r],    codes.zero[r], qmin,
                          qmax,           codes.finite[r] != 0};
    to->scale[r] = code.scale;
    to->zero_point[r] = code.zero_point;
    int8_t* q = to->q + r * to->stride;
    if (from->length == kPiece) {
      quantize_pieces(from->from, from->pieces, r * from->step, code, q);
      continue;
    }
    for (int64_t i = 0; i < from->pieces; ++i, q += from->length) {
      quantize_any<false>(from->from[i] + r * from->step, from->length, &code, q);
    }
  }
}

constexpr WindowKernels kWindowKernels = {
    .rotate_pixels = rotate_pixels,
    .reach = reach_of_windows,
    .quantize = quantize_windows,
};

}  // namespace
}  // namespace qfx::cpu
