// Channels of an image become codes, each in a scale of its own, and products of neighbouring
// pixels. (C5)
#pragma once

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/tables/depthwise.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define QFX_WIDE_LANES
#include "cpu/kernels/rows/depthwise_wide.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if !defined(QFX_WIDE_LANES)
inline void range_of_lanes(const PixelLanes* from, LaneExtremes* extremes) {
  const float* x = from->x;
  for (int64_t i = 0; i < from->count; ++i, x += from->step) {
    for (int n = 0; n < from->lanes; ++n) {
      const uint32_t bits = bits_of(x[n]);
      const int32_t order = static_cast<int32_t>(bits);
      extremes->most[n] = order > extremes->most[n] ? order : extremes->most[n];
      extremes->least[n] = bits > extremes->least[n] ? bits : extremes->least[n];
    }
  }
}

// Whether all numbers of a row have codes within the limits without a clamp: codes are in the order
// of their numbers.
inline bool holds_all(const RowCode& code, const Range& range) {
  const auto code_of = [&](int32_t at) {
    return nearest(from_sortable(at) * code.inverse) + code.zero_point;
  };
  return code.finite && code_of(range.low) >= code.qmin && code_of(range.high) <= code.qmax;
}

inline void codes_of_lanes(const LaneExtremes* extremes, const CodeSpec* spec, LaneCodes* codes) {
  codes->clamped = false;
  for (int n = 0; n < kLanes; ++n) {
    const Range range = range_between({extremes->most[n], extremes->least[n]});
    const RowCode code = code_of_range(range, *spec);
    codes->clamped = codes->clamped || !holds_all(code, range);
    codes->scale[n] = code.scale;
    codes->inverse[n] = code.inverse;
    codes->zero[n] = code.zero_point + kLaneOffset;
    codes->least[n] = kLaneOffset + (code.finite ? code.qmin : 0);  // 0 where it is not (Q4)
    codes->most[n] = kLaneOffset + (code.finite ? code.qmax : 0);
  }
}

inline void quads_of_lanes(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const int64_t pixels = (to->quads - 1) * to->every + kQuadTaps;
  for (int64_t i = 0; i < pixels; ++i) {
    uint8_t q[kLanes];
    const int64_t at = i - to->before;
    float x[kLanes] = {};
    if (at >= 0 && at < from->count) {
      __builtin_memcpy(x, from->x + at * from->step, from->lanes * sizeof(float));
    }
    for (int n = 0; n < kLanes; ++n) {
      int32_t v = static_cast<int32_t>(bits_of(x[n] * codes->inverse[n] + kRound)) -
                  static_cast<int32_t>(bits_of(kRound)) + codes->zero[n];
      v = v < codes->least[n] ? codes->least[n] : v;
      q[n] = static_cast<uint8_t>(v > codes->most[n] ? codes->most[n] : v);
    }
    for (int t = 0; t < kQuadTaps; ++t) {
      const int64_t first = i - t, quad_of = first / to->every;
      if (first < 0 || first % to->every != 0 || quad_of >= to->quads) continue;
      uint8_t* quad = to->out + quad_of * kQuadBytes + t;
      for (int n = 0; n < kLanes; ++n) quad[n * kQuadTaps] = q[n];
    }
  }
}

inline bool products_are_common(const QuadProducts&) { return false; }

#endif

inline void products_of_any_line(const QuadProducts& of, const uint8_t* const* lines, float* out) {
  const LaneColumns& columns = *of.columns;
  for (int64_t o = 0; o < of.count; ++o) {
    int32_t sums[kLanes];
    __builtin_memcpy(sums, columns.first, sizeof(sums));
    const int8_t* w = of.weights;
    for (int64_t r = 0; r < of.rows; ++r) {
      const uint8_t* quad = lines[r] + o * of.steps.per_output * kQuadBytes;
      for (int64_t t = 0; t < of.taps; ++t) {
        for (int n = 0; n < kLanes; ++n) {
          for (int i = 0; i < kQuadTaps; ++i) {
            sums[n] += quad[n * kQuadTaps + i] * w[n * kQuadTaps + i];
          }
        }
        quad += of.steps.per_tap * kQuadBytes;
        w += kTapsBytes;
      }
    }
    float y[kLanes];
    for (int n = 0; n < kLanes; ++n) {
      const float v = static_cast<float>(sums[n]) * columns.scale[n];
      y[n] = v + columns.bias[n];
      y[n] = y[n] < columns.least ? columns.least : y[n];
    }
    __builtin_memcpy(out + o * of.step, y, of.lanes * sizeof(float));
  }
}

inline void products_of_quads(const QuadProducts* of) {
  if (products_are_common(*of)) return;
  products_of_any_line(*of, of->lines, of->out);
  if (of->second != nullptr) products_of_any_line(*of, of->lines + 1, of->second);
}

constexpr DepthwiseKernels kDepthwiseKernels = {
    .range = range_of_lanes,
    .codes = codes_of_lanes,
    .quads = quads_of_lanes,
    .products = products_of_quads,
};

}  // namespace
}  // namespace qfx::cpu
