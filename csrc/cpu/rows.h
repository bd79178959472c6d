// Row kernels written once as plain loops, which each instruction set's file compiles with its own
// flags: conversion, range, quantization and the epilogue. The same bits on all of them.
#pragma once

#include "cpu/activation.h"
#include "cpu/columns.h"
#include "cpu/kernels.h"
#include "cpu/random.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
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
  for (; i < n; ++i) out[i] = static_cast<float>(__builtin_bit_cast(_Float16, half[i]));
}

inline void range_of_row(const float* x, int64_t n, Range* range) {
  int32_t magnitude = 0, low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]);
    const int32_t size = static_cast<int32_t>(bits & 0x7fffffff), order = to_sortable(bits);
    magnitude = size > magnitude ? size : magnitude;
    low = order < low ? order : low;
    high = order > high ? order : high;
  }
  *range = {magnitude, low, high};
}

// (Q3), rne by adding 1.5 * 2^23: |x * inverse| <= qmax - qmin + 1 in every finite row.
inline void quantize_row(const float* x, int64_t n, const RowCode* code, int8_t* q) {
  if (!code->finite) {  // (Q4)
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return;
  }
  constexpr float kRound = 12582912.f;
  constexpr int32_t kRoundBits = 0x4b400000;
  const float inverse = code->inverse;
  const int32_t zero = code->zero_point - kRoundBits, qmin = code->qmin, qmax = code->qmax;
  for (int64_t i = 0; i < n; ++i) {
    int32_t v = static_cast<int32_t>(bits_of(x[i] * inverse + kRound)) + zero;
    v = v < qmin ? qmin : v;
    q[i] = static_cast<int8_t>(v > qmax ? qmax : v);
  }
}

// (Q6): as quantize_row, for a code that was not chosen from this row: x * inverse may be anything.
inline void quantize_clamped_row(const float* x, int64_t n, const RowCode* code, int8_t* q) {
  if (!code->finite) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return;
  }
  constexpr float kRound = 12582912.f, kFar = 1024.f;
  constexpr int32_t kRoundBits = 0x4b400000;
  const float inverse = code->inverse;
  const int32_t zero = code->zero_point - kRoundBits, qmin = code->qmin, qmax = code->qmax;
  for (int64_t i = 0; i < n; ++i) {
    float scaled = x[i] * inverse;
    scaled = scaled < -kFar ? -kFar : scaled;
    scaled = scaled > kFar ? kFar : scaled;
    int32_t v = static_cast<int32_t>(bits_of(scaled + kRound)) + zero;
    v = v < qmin ? qmin : v;
    q[i] = static_cast<int8_t>(v > qmax ? qmax : v);
  }
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

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

inline void store_row(const float* y, int columns, Dtype dtype, void* out) {
  if (dtype == Dtype::kFloat32) {
    __builtin_memcpy(out, y, sizeof(float) * columns);
    return;
  }
  uint16_t half[kPanel];
  if (dtype == Dtype::kBFloat16) {
    for (int n = 0; n < kPanel; ++n) half[n] = to_bfloat16(y[n]);
  } else {
#if defined(__F16C__)
    for (int n = 0; n < kPanel; n += 8) {
      const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(y + n), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(half + n), h);
    }
#else
    for (int n = 0; n < kPanel; ++n) {
      half[n] = __builtin_bit_cast(uint16_t, static_cast<_Float16>(y[n]));
    }
#endif
  }
  __builtin_memcpy(out, half, sizeof(uint16_t) * columns);
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
  for (int n = 0; n < kPanel; ++n) y[n] = activate<A>(y[n]);
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
};

}  // namespace
}  // namespace qfx::cpu
