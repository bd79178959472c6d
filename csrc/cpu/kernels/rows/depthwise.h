// Channels of an image become codes, each in a scale of its own, and products of neighbouring
// pixels. (C5)
#pragma once

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/tables/depthwise.h"
#include "cpu/kernels/tables/panel.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int kVector = 16;

inline __mmask16 lanes_there(int all, int half) {
  const int lanes = all - half * kVector;
  return static_cast<__mmask16>(lanes >= kVector ? 0xffff : lanes <= 0 ? 0 : (1 << lanes) - 1);
}

inline void range_of_lanes(const PixelLanes* from, LaneExtremes* extremes) {
  for (int half = 0; half < 2; ++half) {
    const __mmask16 there = lanes_there(from->lanes, half);
    const int at = half * kVector;
    WideExtremes found, other;
    found.most = _mm512_loadu_si512(extremes->most + at);
    found.least = _mm512_loadu_si512(extremes->least + at);
    const float* x = from->x + at;
    const auto bits = [&](int64_t i) {
      return _mm512_castps_si512(_mm512_maskz_loadu_ps(there, x + i * from->step));
    };
    int64_t i = 0;
    for (; i + 2 <= from->count; i += 2) {
      found.include(bits(i));
      other.include(bits(i + 1));
    }
    if (i < from->count) found.include(bits(i));
    _mm512_storeu_si512(extremes->most + at, _mm512_max_epi32(found.most, other.most));
    _mm512_storeu_si512(extremes->least + at, _mm512_max_epu32(found.least, other.least));
  }
}

// The codes of half of the lanes.
struct WideCodes {
  __mmask16 there;
  __m512 inverse;
  __m512i zero, least, most;

  WideCodes(const PixelLanes& from, const LaneCodes& codes, int half)
      : there(lanes_there(from.lanes, half)),
        inverse(_mm512_loadu_ps(codes.inverse + half * kVector)),
        zero(_mm512_loadu_si512(codes.zero + half * kVector)),
        least(_mm512_loadu_si512(codes.least + half * kVector)),
        most(_mm512_loadu_si512(codes.most + half * kVector)) {}

  __m512i of(const float* x) const { return of(_mm512_maskz_loadu_ps(there, x)); }
  __m512i of(__m512 x) const {
    const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)), zero);
    return _mm512_min_epi32(_mm512_max_epi32(q, least), most);
  }
};

inline void quads_of_lanes(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to) {
  const int64_t quads = to->quads, step = from->step;
  const int64_t before = to->before < quads + kQuadTaps - 1 ? to->before : quads + kQuadTaps - 1;
  const int64_t rest = quads + kQuadTaps - 1 - before;
  const int64_t count = from->count < rest ? from->count : rest, after = rest - count;
  for (int half = 0; half < 2; ++half) {
    const WideCodes code(*from, *codes, half);
    const __m512i edge = code.of(_mm512_setzero_ps());
    __m512i quad = _mm512_setzero_si512();
    uint8_t* out = to->out + half * kVector * kQuadTaps;
    int64_t skipped = kQuadTaps - 1;
    const auto shift = [&](__m512i next) {
      quad = _mm512_or_si512(_mm512_srli_epi32(quad, 8), _mm512_slli_epi32(next, 24));
    };
    const auto add = [&](__m512i next) {
      shift(next);
      if (skipped > 0) return void(--skipped);
      _mm512_storeu_si512(out, quad);
      out += kQuadBytes;
    };
    for (int64_t i = 0; i < before; ++i) add(edge);
    const float* x = from->x + half * kVector;
    int64_t i = 0;
    for (; i < count && skipped > 0; ++i, x += step) add(code.of(x));
    for (; i < count; ++i, x += step, out += kQuadBytes) {
      shift(code.of(x));
      _mm512_storeu_si512(out, quad);
    }
    for (i = 0; i < after; ++i) add(edge);
  }
}

// kOutputs outputs of half of the lanes, in registers over all lines.
template <int kTaps, int kStride, int kOutputs>
inline void products_of_half(const QuadProducts& of, int64_t o, int half) {
  const int64_t at = half * kVector;
  const LaneColumns& columns = *of.columns;
  __m512i acc[kOutputs];
#pragma GCC unroll 14
  for (int i = 0; i < kOutputs; ++i) acc[i] = _mm512_loadu_si512(columns.first + at);
  const int8_t* w = of.weights + at * kQuadTaps;
  for (int64_t r = 0; r < of.rows; ++r) {
    const uint8_t* line = of.lines[r] + o * kStride * kQuadBytes + at * kQuadTaps;
#pragma GCC unroll 2
    for (int t = 0; t < kTaps; ++t, w += kQuadBytes) {
      const __m512i weights = _mm512_loadu_si512(w);
#pragma GCC unroll 14
      for (int i = 0; i < kOutputs; ++i) {
        const uint8_t* quad = line + (i * kStride + t * kQuadTaps) * kQuadBytes;
        acc[i] = _mm512_dpbusd_epi32(acc[i], _mm512_loadu_si512(quad), weights);
      }
    }
  }
  const __m512 scale = _mm512_loadu_ps(columns.scale + at);
  const __m512 bias = _mm512_loadu_ps(columns.bias + at), least = _mm512_set1_ps(columns.least);
  const __mmask16 there = lanes_there(of.lanes, half);
  float* out = of.out + o * of.step + at;
#pragma GCC unroll 14
  for (int i = 0; i < kOutputs; ++i) {
    const __m512 y = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[i]), scale), bias);
    _mm512_mask_storeu_ps(out + i * of.step, there, _mm512_max_ps(least, y));  // a NaN stays
  }
}

template <int kTaps, int kStride, int kOutputs>
inline void products_of_block(const QuadProducts& of, int64_t o) {
  products_of_half<kTaps, kStride, kOutputs>(of, o, 0);
  products_of_half<kTaps, kStride, kOutputs>(of, o, 1);
}

// In blocks of which the lines of usual images consist: 7, 14, 28, 56, 112.
template <int kTaps, int kStride>
inline void products_of_taps(const QuadProducts& of) {
  int64_t o = 0;
  for (; o + 14 <= of.count; o += 14) products_of_block<kTaps, kStride, 14>(of, o);
  for (; o + 7 <= of.count; o += 7) products_of_block<kTaps, kStride, 7>(of, o);
  for (; o + 2 <= of.count; o += 2) products_of_block<kTaps, kStride, 2>(of, o);
  for (; o < of.count; ++o) products_of_block<kTaps, kStride, 1>(of, o);
}

// Whether they are computed.
inline bool products_are_common(const QuadProducts& of) {
  if (of.taps == 1 && of.stride == 1) return products_of_taps<1, 1>(of), true;
  if (of.taps == 1 && of.stride == 2) return products_of_taps<1, 2>(of), true;
  if (of.taps == 2 && of.stride == 1) return products_of_taps<2, 1>(of), true;
  if (of.taps == 2 && of.stride == 2) return products_of_taps<2, 2>(of), true;
  return false;
}

#else

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

inline void quads_of_lanes(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const int64_t pixels = to->quads + kQuadTaps - 1;
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
      if (i - t < 0 || i - t >= to->quads) continue;
      uint8_t* quad = to->out + (i - t) * kQuadBytes + t;
      for (int n = 0; n < kLanes; ++n) quad[n * kQuadTaps] = q[n];
    }
  }
}

inline bool products_are_common(const QuadProducts&) { return false; }

#endif

inline void products_of_quads(const QuadProducts* of) {
  if (products_are_common(*of)) return;
  const LaneColumns& columns = *of->columns;
  for (int64_t o = 0; o < of->count; ++o) {
    int32_t sums[kLanes];
    __builtin_memcpy(sums, columns.first, sizeof(sums));
    const int8_t* w = of->weights;
    for (int64_t r = 0; r < of->rows; ++r) {
      const uint8_t* quad = of->lines[r] + o * of->stride * kQuadBytes;
      for (int64_t t = 0; t < of->taps; ++t) {
        for (int n = 0; n < kLanes; ++n) {
          for (int i = 0; i < kQuadTaps; ++i) {
            sums[n] += quad[n * kQuadTaps + i] * w[n * kQuadTaps + i];
          }
        }
        quad += kQuadTaps * kQuadBytes;
        w += kQuadBytes;
      }
    }
    float y[kLanes];
    for (int n = 0; n < kLanes; ++n) {
      const float v = static_cast<float>(sums[n]) * columns.scale[n];
      y[n] = v + columns.bias[n];
      y[n] = y[n] < columns.least ? columns.least : y[n];
    }
    __builtin_memcpy(of->out + o * of->step, y, of->lanes * sizeof(float));
  }
}

constexpr DepthwiseKernels kDepthwiseKernels = {
    .range = range_of_lanes,
    .quads = quads_of_lanes,
    .products = products_of_quads,
};

}  // namespace
}  // namespace qfx::cpu
