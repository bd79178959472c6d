// Products of depthwise convolutions in vectors of 512 bits. (C5)
#pragma once

#include "cpu/kernels/rows/lane_codes_wide.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

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
