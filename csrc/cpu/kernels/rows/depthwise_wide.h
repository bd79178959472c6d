// The kernels of depthwise convolutions in vectors of 512 bits. (C5)
#pragma once

#include <immintrin.h>

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/tables/depthwise.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

static_assert(kLanes == 16, "a vector holds the lanes");

inline __mmask16 lanes_there(int lanes) {
  return static_cast<__mmask16>(lanes >= kLanes ? 0xffff : (1 << lanes) - 1);
}

inline void range_of_lanes(const PixelLanes* from, LaneExtremes* extremes) {
  const __mmask16 there = lanes_there(from->lanes);
  WideExtremes found, other;
  found.most = _mm512_loadu_si512(extremes->most);
  found.least = _mm512_loadu_si512(extremes->least);
  const float* x = from->x;
  const int64_t step = from->step;
  const auto bits = [&](const float* at) {
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(there, at));
  };
  int64_t i = 0;
  for (; i + 2 <= from->count; i += 2, x += 2 * step) {
    found.include(bits(x));
    other.include(bits(x + step));
  }
  if (i < from->count) found.include(bits(x));
  _mm512_storeu_si512(extremes->most, _mm512_max_epi32(found.most, other.most));
  _mm512_storeu_si512(extremes->least, _mm512_max_epu32(found.least, other.least));
}

// Codes of pixels one after the other, of which each `every`-th quad is stored.
template <bool kClamped>
class WideQuads {
 public:
  WideQuads(const PixelLanes& from, const LaneCodes& codes, const QuadLine& to)
      : there_(lanes_there(from.lanes)),
        inverse_(_mm512_loadu_ps(codes.inverse)),
        zero_(_mm512_loadu_si512(codes.zero)),
        least_(_mm512_loadu_si512(codes.least)),
        most_(_mm512_loadu_si512(codes.most)),
        out_(to.out),
        every_(to.every) {}

  void add_zeros(int64_t count) {
    const __m512i code = code_of(_mm512_setzero_ps());
    for (int64_t i = 0; i < count; ++i) add(code);
  }

  void add(const float* x, int64_t step, int64_t count) {
    int64_t i = 0;
    for (; i < count && skipped_ != every_ - 1; ++i, x += step) add(code_at(x));
    if (every_ == 1) {
      for (; i < count; ++i, x += step) store(code_at(x));
    } else if (every_ == 2) {
      for (; i + 2 <= count; i += 2, x += 2 * step) {
        shift(code_at(x));
        store(code_at(x + step));
      }
    }
    for (; i < count; ++i, x += step) add(code_at(x));
  }

 private:
  __m512i code_at(const float* x) const { return code_of(_mm512_maskz_loadu_ps(there_, x)); }

  __m512i code_of(__m512 x) const {
    const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse_)), zero_);
    return kClamped ? _mm512_min_epi32(_mm512_max_epi32(q, least_), most_) : q;
  }

  // The lowest byte of `next` becomes the last one.
  void shift(__m512i next) {
    quad_ = _mm512_mask_shuffle_epi8(_mm512_srli_epi32(quad_, 8), kLastBytes, next, to_last_);
  }

  void store(__m512i next) {
    shift(next);
    _mm512_storeu_si512(out_, quad_);
    out_ += kQuadBytes;
  }

  void add(__m512i next) {
    shift(next);
    if (skipped_ > 0) return void(--skipped_);
    _mm512_storeu_si512(out_, quad_);
    out_ += kQuadBytes;
    skipped_ = every_ - 1;
  }

  static constexpr __mmask64 kLastBytes = 0x8888888888888888;

  const __mmask16 there_;
  const __m512 inverse_;
  const __m512i zero_, least_, most_;
  // Of each four bytes, the place of the first among its sixteen.
  const __m512i to_last_ = _mm512_broadcast_i32x4(_mm_set_epi32(12 << 24, 8 << 24, 4 << 24, 0));
  __m512i quad_ = _mm512_setzero_si512();
  uint8_t* out_;
  const int64_t every_;
  int64_t skipped_ = kQuadTaps - 1;
};

template <bool kClamped>
inline void quads_with_codes(const PixelLanes& from, const LaneCodes& codes, const QuadLine& to) {
  const int64_t pixels = (to.quads - 1) * to.every + kQuadTaps;
  const int64_t before = to.before < pixels ? to.before : pixels;
  const int64_t count = from.count < pixels - before ? from.count : pixels - before;
  WideQuads<kClamped> quads(from, codes, to);
  quads.add_zeros(before);
  quads.add(from.x, from.step, count);
  quads.add_zeros(pixels - before - count);
}

inline void quads_of_lanes(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to) {
  if (codes->clamped) return quads_with_codes<true>(*from, *codes, *to);
  quads_with_codes<false>(*from, *codes, *to);
}

// Writes sums of kOutputs outputs.
template <int kOutputs>
inline __attribute__((always_inline)) void finish_lanes(const QuadProducts& of, const __m512i* sums,
                                                        float* out) {
  const LaneColumns& columns = *of.columns;
  const __m512 scale = _mm512_loadu_ps(columns.scale), bias = _mm512_loadu_ps(columns.bias);
  const __m512 least = _mm512_set1_ps(columns.least);
  const __mmask16 there = lanes_there(of.lanes);
  const auto finished = [&](__m512i sum) {
    const __m512 y = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale), bias);
    return _mm512_max_ps(least, y);  // a NaN stays
  };
  if (of.lanes >= kLanes) {
#pragma GCC unroll 14
    for (int i = 0; i < kOutputs; ++i) _mm512_storeu_ps(out + i * of.step, finished(sums[i]));
  } else {
#pragma GCC unroll 14
    for (int i = 0; i < kOutputs; ++i) {
      _mm512_mask_storeu_ps(out + i * of.step, there, finished(sums[i]));
    }
  }
}

inline __m512i quad_at(const void* at) { return _mm512_loadu_si512(at); }

// Adds the products of a line to kOutputs sums: each quad is loaded once for all that read it.
template <int kTaps, int kPerTap, int kOutputs>
inline __attribute__((always_inline)) void add_line(const uint8_t* line, const int8_t* w,
                                                    __m512i* sums) {
  constexpr int kQuads = kOutputs + (kTaps - 1) * kPerTap;
  __m512i weights[kTaps];
#pragma GCC unroll 2
  for (int t = 0; t < kTaps; ++t) weights[t] = quad_at(w + t * kTapsBytes);
#pragma GCC unroll 18
  for (int i = 0; i < kQuads; ++i) {
    const __m512i quad = quad_at(line + i * kQuadBytes);
#pragma GCC unroll 2
    for (int t = 0; t < kTaps; ++t) {
      const int o = i - t * kPerTap;
      if (o >= 0 && o < kOutputs) sums[o] = _mm512_dpbusd_epi32(sums[o], quad, weights[t]);
    }
  }
}

// The same for two lines of outputs, of which the second has the weights of the line before.
template <int kTaps, int kPerTap, int kOutputs>
inline __attribute__((always_inline)) void add_line_to_both(const uint8_t* line, const int8_t* w,
                                                            __m512i* first, __m512i* second) {
  constexpr int kQuads = kOutputs + (kTaps - 1) * kPerTap;
  __m512i of_first[kTaps], of_second[kTaps];
#pragma GCC unroll 2
  for (int t = 0; t < kTaps; ++t) {
    of_first[t] = quad_at(w + t * kTapsBytes);
    of_second[t] = quad_at(w + (t - kTaps) * kTapsBytes);
  }
#pragma GCC unroll 18
  for (int i = 0; i < kQuads; ++i) {
    const __m512i quad = quad_at(line + i * kQuadBytes);
#pragma GCC unroll 2
    for (int t = 0; t < kTaps; ++t) {
      const int o = i - t * kPerTap;
      if (o < 0 || o >= kOutputs) continue;
      first[o] = _mm512_dpbusd_epi32(first[o], quad, of_first[t]);
      second[o] = _mm512_dpbusd_epi32(second[o], quad, of_second[t]);
    }
  }
}

// kOutputs outputs of one line or two, in registers over all lines of the image.
template <int kTaps, int kPerTap, int kOutputs, bool kBoth>
inline void products_of_block(const QuadProducts& of, int64_t o) {
  __m512i first[kOutputs], second[kOutputs];
#pragma GCC unroll 14
  for (int i = 0; i < kOutputs; ++i) {
    first[i] = _mm512_loadu_si512(of.columns->first);
    second[i] = first[i];
  }
  constexpr int kLineBytes = kTaps * kTapsBytes;
  const int64_t at = o * kQuadBytes;
  add_line<kTaps, kPerTap, kOutputs>(of.lines[0] + at, of.weights, first);
  for (int64_t r = 1; r < of.rows; ++r) {
    const int8_t* w = of.weights + r * kLineBytes;
    if (kBoth) {
      add_line_to_both<kTaps, kPerTap, kOutputs>(of.lines[r] + at, w, first, second);
    } else {
      add_line<kTaps, kPerTap, kOutputs>(of.lines[r] + at, w, first);
    }
  }
  finish_lanes<kOutputs>(of, first, of.out + o * of.step);
  if (!kBoth) return;
  const int8_t* last = of.weights + (of.rows - 1) * kLineBytes;
  add_line<kTaps, kPerTap, kOutputs>(of.lines[of.rows] + at, last, second);
  finish_lanes<kOutputs>(of, second, of.second + o * of.step);
}

// In blocks of which the lines of usual images consist: 7, 14, 28, 56, 112.
template <int kTaps, int kPerTap, bool kBoth>
inline void products_of_lines(const QuadProducts& of) {
  int64_t o = 0;
  if (!kBoth) {
    for (; o + 14 <= of.count; o += 14) products_of_block<kTaps, kPerTap, 14, kBoth>(of, o);
  }
  for (; o + 7 <= of.count; o += 7) products_of_block<kTaps, kPerTap, 7, kBoth>(of, o);
  for (; o + 2 <= of.count; o += 2) products_of_block<kTaps, kPerTap, 2, kBoth>(of, o);
  for (; o < of.count; ++o) products_of_block<kTaps, kPerTap, 1, kBoth>(of, o);
}

template <int kTaps, int kPerTap>
inline bool products_of_taps(const QuadProducts& of) {
  if (of.second == nullptr) {
    products_of_lines<kTaps, kPerTap, false>(of);
  } else {
    products_of_lines<kTaps, kPerTap, true>(of);
  }
  return true;
}

// Whether they are computed.
inline bool products_are_common(const QuadProducts& of) {
  if (of.steps.per_output != 1) return false;
  if (of.taps == 1) return products_of_taps<1, 0>(of);
  if (of.taps == 2 && of.steps.per_tap == 4) return products_of_taps<2, 4>(of);
  if (of.taps == 2 && of.steps.per_tap == 2) return products_of_taps<2, 2>(of);
  return false;
}

}  // namespace
}  // namespace qfx::cpu
