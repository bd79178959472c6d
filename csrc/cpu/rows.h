// Row kernels written once as plain loops, which each instruction set's file compiles with its own
// flags: conversion, range, quantization and the epilogue. The same bits on all of them.
#pragma once

#include "cpu/activation.h"
#include "cpu/columns.h"
#include "cpu/groups.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "cpu/softmax.h"
#include "cpu/store.h"
#include "cpu/weight_only.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {

inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Order of floats as order of integers; the inverse is itself.
inline int32_t to_sortable(uint32_t bits) {
  const int32_t b = static_cast<int32_t>(bits);
  return b ^ ((b >> 31) & 0x7fffffff);
}

inline void widen_row(const void* x, Dtype dtype, int64_t n, float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(x);
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(half[i]) << 16);
    return;
  }
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(h));
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<float>(__builtin_bit_cast(Half, half[i]));
}

// As signed integers, bit patterns of positive floats are in order and above all negative ones; as
// unsigned integers those of negative floats are in reverse order and above all positive ones.
struct Extremes {
  int32_t most;    // of the signed patterns and 0
  uint32_t least;  // the greatest unsigned pattern
};

#if defined(__AVX512BW__)
inline Extremes extremes_of_row(const float* x, int64_t n) {
  __m512i most = _mm512_setzero_si512(), least = most;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 there = i + 16 <= n ? 0xffff : (1 << (n - i)) - 1;
    const __m512i bits = _mm512_maskz_loadu_epi32(there, x + i);
    most = _mm512_max_epi32(most, bits);
    least = _mm512_max_epu32(least, bits);
  }
  return {_mm512_reduce_max_epi32(most), _mm512_reduce_max_epu32(least)};
}
#elif defined(__AVX2__)
inline Extremes extremes_of_row(const float* x, int64_t n) {
  __m256i most[2] = {}, least[2] = {};
  const auto widen = [&](const float* from, int i) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    most[i] = _mm256_max_epi32(most[i], bits);
    least[i] = _mm256_max_epu32(least[i], bits);
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    widen(x + i, 0);
    widen(x + i + 8, 1);
  }
  if (i < n) {
    float rest[16] = {};
    __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
    widen(rest, 0);
    widen(rest + 8, 1);
  }
  const __m256i high = _mm256_max_epi32(most[0], most[1]),
                low = _mm256_max_epu32(least[0], least[1]);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  __m128i l = _mm_max_epu32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  l = _mm_max_epu32(l, _mm_shuffle_epi32(l, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  l = _mm_max_epu32(l, _mm_shuffle_epi32(l, 0xb1));
  return {_mm_cvtsi128_si32(m), static_cast<uint32_t>(_mm_cvtsi128_si32(l))};
}
#else
inline Extremes extremes_of_row(const float* x, int64_t n) {
  Extremes found = {0, 0};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]);
    const int32_t order = static_cast<int32_t>(bits);
    found.most = order > found.most ? order : found.most;
    found.least = bits > found.least ? bits : found.least;
  }
  return found;
}
#endif

inline void range_of_row(const float* x, int64_t n, Range* range) {
  const auto [most, least] = extremes_of_row(x, n);
  const int32_t low = static_cast<int32_t>(least) < 0 ? to_sortable(least) : 0;
  const int32_t size = low < 0 ? static_cast<int32_t>(least & 0x7fffffff) : 0;
  *range = {size > most ? size : most, low, most};
}

// rne(x * inverse) + zero_point of kBlock elements, clamped to [qmin, qmax]. kFar: x * inverse may
// be anything and is first clamped to +-1024; else |x * inverse| <= qmax - qmin + 1.
constexpr int kBlock = 32;

template <bool kFar>
inline float scaled(float x, float inverse) {
  constexpr float kLimit = 1024.f;
  float v = x * inverse;
  if constexpr (kFar) {
    v = v < -kLimit ? -kLimit : v;
    v = v > kLimit ? kLimit : v;
  }
  return v;
}

#if defined(__AVX512BW__)
template <bool kFar>
inline __m128i codes_of_16(const float* x, const RowCode& code) {
  __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(code.inverse));
  if constexpr (kFar) {
    v = _mm512_max_ps(_mm512_set1_ps(-1024.f), v);
    v = _mm512_min_ps(_mm512_set1_ps(1024.f), v);
  }
  const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(code.zero_point));
  return _mm512_cvtsepi32_epi8(q);  // saturates, which clamps to 8 bits
}

template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  __m256i v = _mm256_set_m128i(codes_of_16<kFar>(x + 16, code), codes_of_16<kFar>(x, code));
  v = _mm256_max_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmin)));
  v = _mm256_min_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmax)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), v);
}
#elif defined(__AVX2__)
template <bool kFar>
inline __m256i codes_of_8(const float* x, const RowCode& code) {
  __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(code.inverse));
  if constexpr (kFar) {
    v = _mm256_max_ps(_mm256_set1_ps(-1024.f), v);
    v = _mm256_min_ps(_mm256_set1_ps(1024.f), v);
  }
  return _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(code.zero_point));
}

template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  // The packing instructions saturate, which clamps to 8 bits, and work in halves of 16 bytes.
  const __m256i low = _mm256_packs_epi32(codes_of_8<kFar>(x, code), codes_of_8<kFar>(x + 8, code));
  const __m256i high =
      _mm256_packs_epi32(codes_of_8<kFar>(x + 16, code), codes_of_8<kFar>(x + 24, code));
  __m256i v = _mm256_packs_epi16(low, high);
  v = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  v = _mm256_max_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmin)));
  v = _mm256_min_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmax)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), v);
}
#else
template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const int32_t zero = code.zero_point - static_cast<int32_t>(bits_of(kRound));
  for (int i = 0; i < kBlock; ++i) {
    int32_t v = static_cast<int32_t>(bits_of(scaled<kFar>(x[i], code.inverse) + kRound)) + zero;
    v = v < code.qmin ? code.qmin : v;
    q[i] = static_cast<int8_t>(v > code.qmax ? code.qmax : v);
  }
}
#endif

template <bool kFar>
inline void quantize_any(const float* x, int64_t n, const RowCode* code, int8_t* q) {
  if (!code->finite) {  // (Q4)
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return;
  }
  const RowCode kept = *code;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) quantize_block<kFar>(x + i, kept, q + i);
  if (i == n) return;
  float rest[kBlock] = {};
  int8_t codes[kBlock];
  __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
  quantize_block<kFar>(rest, kept, codes);
  __builtin_memcpy(q + i, codes, n - i);
}

// (Q3)
inline void quantize_row(const float* x, int64_t n, const RowCode* code, int8_t* q) {
  quantize_any<false>(x, n, code, q);
}

// (Q6): for a code that was not chosen from this row.
inline void quantize_clamped_row(const float* x, int64_t n, const RowCode* code, int8_t* q) {
  quantize_any<true>(x, n, code, q);
}

// (Q7): as quantize_row for a symmetric code, rounded up with the probability of the fraction.
inline void quantize_stochastic_row(const float* x, int64_t n, const RowCode* code,
                                    const uint16_t* random, int8_t* q) {
  if (!code->finite) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return;
  }
  const float inverse = code->inverse;
  const int32_t qmin = code->qmin, qmax = code->qmax;
  for (int64_t i = 0; i < n; ++i) {
    const float u = static_cast<float>(random[i]) * 0x1p-16f + 0x1p-17f;
    const float sum = x[i] * inverse + u;
    int32_t v = static_cast<int32_t>(sum);
    v = sum < static_cast<float>(v) ? v - 1 : v;
    v = v < qmin ? qmin : v;
    q[i] = static_cast<int8_t>(v > qmax ? qmax : v);
  }
}

template <Activation A>
inline void activate_all(float* y) {
  for (int n = 0; n < kPanel; ++n) y[n] = activate<A>(y[n]);
}

inline void activate_row(Activation activation, float* y) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return activate_all<Activation::kRelu>(y);
    case Activation::kGelu:
      return activate_all<Activation::kGelu>(y);
    case Activation::kGeluTanh:
      return activate_all<Activation::kGeluTanh>(y);
    case Activation::kSilu:
      return activate_all<Activation::kSilu>(y);
  }
}

// y[n] = act(float(raw + add - mul * colsum) * (scale * wscale) + bias)                       (E1)
template <Activation A>
inline void finish_row(const int32_t* raw, uint32_t add, uint32_t mul, float scale, const Panel& p,
                       float* y) {
  for (int n = 0; n < kPanel; ++n) {
    const uint32_t acc =
        static_cast<uint32_t>(raw[n]) + add - mul * static_cast<uint32_t>(p.colsum[n]);
    y[n] = static_cast<float>(static_cast<int32_t>(acc)) * (scale * p.scale[n]);
  }
  if (p.has_bias) {
    for (int n = 0; n < kPanel; ++n) y[n] = y[n] + p.bias[n];
  }
  activate_all<A>(y);
}

template <Activation A>
inline void finish_tile(const EpilogueArgs& e) {
  const int64_t element = e.dtype == Dtype::kFloat32 ? 4 : 2;
  alignas(64) float y[kPanel];
  for (int m = 0; m < e.rows; ++m) {
    const uint32_t add = static_cast<uint32_t>(e.row_add[m]),
                   mul = static_cast<uint32_t>(e.row_mul[m]);
    finish_row<A>(e.tile + m * kPanel, add, mul, e.row_scale[m * e.scale_stride], *e.panel, y);
    store_row(y, e.columns, e.dtype, static_cast<char*>(e.out) + m * e.ldo * element);
  }
}

inline void epilogue(const EpilogueArgs* args) {
  switch (args->activation) {
    case Activation::kNone:
      return finish_tile<Activation::kNone>(*args);
    case Activation::kRelu:
      return finish_tile<Activation::kRelu>(*args);
    case Activation::kGelu:
      return finish_tile<Activation::kGelu>(*args);
    case Activation::kGeluTanh:
      return finish_tile<Activation::kGeluTanh>(*args);
    case Activation::kSilu:
      return finish_tile<Activation::kSilu>(*args);
  }
}

// One of the two scales is 1, which changes nothing.                                    (W1) (E3)
inline void finish_floats(const FloatEpilogueArgs* args) {
  const FloatEpilogueArgs& e = *args;
  const int64_t element = e.dtype == Dtype::kFloat32 ? 4 : 2;
  alignas(64) float y[kPanel];
  for (int m = 0; m < e.rows; ++m) {
    const float scale = e.row_scale[m * e.scale_stride], *sums = e.sums + m * kPanel;
    for (int n = 0; n < kPanel; ++n) y[n] = sums[n] * (scale * e.panel->scale[n]);
    if (e.panel->has_bias) {
      for (int n = 0; n < kPanel; ++n) y[n] = y[n] + e.panel->bias[n];
    }
    activate_row(e.activation, y);
    store_row(y, e.columns, e.dtype, static_cast<char*>(e.out) + m * e.ldo * element);
  }
}

constexpr RowKernels kRowKernels = {
    .widen = widen_row,
    .range = range_of_row,
    .quantize = quantize_row,
    .quantize_clamped = quantize_clamped_row,
    .random = random_groups,
    .quantize_stochastic = quantize_stochastic_row,
    .range_of_columns = range_of_columns,
    .quantize_columns = quantize_columns,
    .epilogue = epilogue,
    .add_groups = add_groups,
    .score = score_row,
    .probabilities = probabilities_of_row,
    .mix = mix_row,
    .weight_only = weight_only,
    .finish_floats = finish_floats,
};

}  // namespace
}  // namespace qfx::cpu
