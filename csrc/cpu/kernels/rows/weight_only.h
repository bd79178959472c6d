// One row of floats times one panel of int8 weights: equation (W1).
//     sums[n] = s[0][n] + s[1][n],  from 0 for g = 0, 1, ...
//     s[i][n] = fma(x[4 g + 2 i + 1], w[g][n][2 i + 1], fma(x[4 g + 2 i], w[g][n][2 i], s[i][n]))
// The same operations in the same order on every instruction set. x is zero padded to whole groups.
// `ahead` is the prefetch distance in bytes; the memory there need not exist.
#pragma once

#include "cpu/kernels/tables/tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>

#include "cpu/kernels/rows/fetch.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX512F__)
// Byte kByte of each group of 4, as float.
template <int kByte>
inline __m512 weights_of(__m512i w) {
  if constexpr (kByte < 3) w = _mm512_slli_epi32(w, 24 - 8 * kByte);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(w, 24));
}

inline __m512 step(const float* x, __m512i w, int i, __m512 s) {
  const __m512 even = i == 0 ? weights_of<0>(w) : weights_of<2>(w);
  const __m512 odd = i == 0 ? weights_of<1>(w) : weights_of<3>(w);
  s = _mm512_fmadd_ps(_mm512_set1_ps(x[2 * i]), even, s);
  return _mm512_fmadd_ps(_mm512_set1_ps(x[2 * i + 1]), odd, s);
}

template <int kHint>
void weight_only(const float* x, const int8_t* b, int64_t groups, int64_t ahead, float* sums) {
  __m512 s[2][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
    fetch<kHint>(b + ahead);
    fetch<kHint>(b + ahead + 64);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i w = _mm512_loadu_si512(b + 64 * v);
      s[0][v] = step(x, w, 0, s[0][v]);
      s[1][v] = step(x, w, 1, s[1][v]);
    }
  }
  for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + 16 * v, _mm512_add_ps(s[0][v], s[1][v]));
}
#elif defined(__AVX2__)
template <int kByte>
inline __m256 weights_of(__m256i w) {
  if constexpr (kByte < 3) w = _mm256_slli_epi32(w, 24 - 8 * kByte);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24));
}

inline __m256 step(const float* x, __m256i w, int i, __m256 s) {
  const __m256 even = i == 0 ? weights_of<0>(w) : weights_of<2>(w);
  const __m256 odd = i == 0 ? weights_of<1>(w) : weights_of<3>(w);
  s = _mm256_fmadd_ps(_mm256_set1_ps(x[2 * i]), even, s);
  return _mm256_fmadd_ps(_mm256_set1_ps(x[2 * i + 1]), odd, s);
}

template <int kHint>
void weight_only(const float* x, const int8_t* b, int64_t groups, int64_t ahead, float* sums) {
  __m256 s[2][4] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
    fetch<kHint>(b + ahead);
    fetch<kHint>(b + ahead + 64);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + v);
      s[0][v] = step(x, w, 0, s[0][v]);
      s[1][v] = step(x, w, 1, s[1][v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) _mm256_storeu_ps(sums + 8 * v, _mm256_add_ps(s[0][v], s[1][v]));
}
#else
template <int>
void weight_only(const float* x, const int8_t* b, int64_t groups, int64_t, float* sums) {
  float s[2][kPanel] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
    for (int j = 0; j < kGroup; ++j) {
      float* to = s[j / 2];
      for (int n = 0; n < kPanel; ++n) {
        to[n] = __builtin_fmaf(x[j], static_cast<float>(b[n * kGroup + j]), to[n]);
      }
    }
  }
  for (int n = 0; n < kPanel; ++n) sums[n] = s[0][n] + s[1][n];
}
#endif

}  // namespace
}  // namespace qfx::cpu
