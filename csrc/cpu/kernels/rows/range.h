// The range of a row of floats, in the order of their bit patterns.
#pragma once

#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/tables/code.h"
#include "cpu/kernels/tables/rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX512BW__)
struct WideExtremes {
  __m512i most = _mm512_setzero_si512(), least = _mm512_setzero_si512();

  void include(__m512i bits) {
    most = _mm512_max_epi32(most, bits);
    least = _mm512_max_epu32(least, bits);
  }
  Extremes reduced() const {
    return {_mm512_reduce_max_epi32(most), _mm512_reduce_max_epu32(least)};
  }
  // The patterns of the negated numbers, which are in order where any of these is negative.
  __m512i negated_least() const { return _mm512_xor_si512(least, _mm512_set1_epi32(1 << 31)); }
};

inline Extremes extremes_of_row(const float* x, int64_t n) {
  WideExtremes found;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 there = i + 16 <= n ? 0xffff : (1 << (n - i)) - 1;
    found.include(_mm512_maskz_loadu_epi32(there, x + i));
  }
  return found.reduced();
}
#elif defined(__AVX2__)
struct WideExtremes {
  __m256i most = _mm256_setzero_si256(), least = _mm256_setzero_si256();

  void include(__m256i bits) {
    most = _mm256_max_epi32(most, bits);
    least = _mm256_max_epu32(least, bits);
  }
  void include(const WideExtremes& other) {
    most = _mm256_max_epi32(most, other.most);
    least = _mm256_max_epu32(least, other.least);
  }
  Extremes reduced() const {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    __m128i l = _mm_max_epu32(_mm256_castsi256_si128(least), _mm256_extracti128_si256(least, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    l = _mm_max_epu32(l, _mm_shuffle_epi32(l, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    l = _mm_max_epu32(l, _mm_shuffle_epi32(l, 0xb1));
    return {_mm_cvtsi128_si32(m), static_cast<uint32_t>(_mm_cvtsi128_si32(l))};
  }
  __m256i negated_least() const { return _mm256_xor_si256(least, _mm256_set1_epi32(1 << 31)); }
};

inline Extremes extremes_of_row(const float* x, int64_t n) {
  WideExtremes found[2];
  const auto include = [&](const float* from, int i) {
    found[i].include(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    include(x + i, 0);
    include(x + i + 8, 1);
  }
  if (i < n) {
    float rest[16] = {};
    __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
    include(rest, 0);
    include(rest + 8, 1);
  }
  found[0].include(found[1]);
  return found[0].reduced();
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

inline Range united(const Range& a, const Range& b) {
  return {a.magnitude > b.magnitude ? a.magnitude : b.magnitude, a.low < b.low ? a.low : b.low,
          a.high > b.high ? a.high : b.high};
}

inline void range_of_row(const float* x, int64_t n, Range* range) {
  *range = range_between(extremes_of_row(x, n));
}

}  // namespace
}  // namespace qfx::cpu
