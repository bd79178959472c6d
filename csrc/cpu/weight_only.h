// One row of floats times one panel of int8 weights: equation (W1).
//     sums[n] = (s[0][n] + s[1][n]) + (s[2][n] + s[3][n])
//     s[j][n] = the fused multiply-adds of x[4 g + j] w[g][n][j] over g = 0, 1, ..., from 0
// The same operations in the same order on every instruction set. x is zero padded to whole groups.
#pragma once

#include "cpu/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
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

inline void weight_only(const float* x, const int8_t* b, int64_t groups, float* sums) {
  __m512 s[4][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i w = _mm512_loadu_si512(b + 64 * v);
      s[0][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), weights_of<0>(w), s[0][v]);
      s[1][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[1]), weights_of<1>(w), s[1][v]);
      s[2][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[2]), weights_of<2>(w), s[2][v]);
      s[3][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[3]), weights_of<3>(w), s[3][v]);
    }
  }
  for (int v = 0; v < 2; ++v) {
    const __m512 low = _mm512_add_ps(s[0][v], s[1][v]), high = _mm512_add_ps(s[2][v], s[3][v]);
    _mm512_storeu_ps(sums + 16 * v, _mm512_add_ps(low, high));
  }
}
#elif defined(__AVX2__)
template <int kByte>
inline __m256 weights_of(__m256i w) {
  if constexpr (kByte < 3) w = _mm256_slli_epi32(w, 24 - 8 * kByte);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24));
}

// 16 columns, one cache line a group: 8 accumulators, which hides the latency of the addition.
inline void weight_only_half(const float* x, const int8_t* b, int64_t groups, float* sums) {
  __m256 s[4][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + v);
      s[0][v] = _mm256_fmadd_ps(_mm256_set1_ps(x[0]), weights_of<0>(w), s[0][v]);
      s[1][v] = _mm256_fmadd_ps(_mm256_set1_ps(x[1]), weights_of<1>(w), s[1][v]);
      s[2][v] = _mm256_fmadd_ps(_mm256_set1_ps(x[2]), weights_of<2>(w), s[2][v]);
      s[3][v] = _mm256_fmadd_ps(_mm256_set1_ps(x[3]), weights_of<3>(w), s[3][v]);
    }
  }
  for (int v = 0; v < 2; ++v) {
    const __m256 low = _mm256_add_ps(s[0][v], s[1][v]), high = _mm256_add_ps(s[2][v], s[3][v]);
    _mm256_storeu_ps(sums + 8 * v, _mm256_add_ps(low, high));
  }
}

inline void weight_only(const float* x, const int8_t* b, int64_t groups, float* sums) {
  weight_only_half(x, b, groups, sums);
  weight_only_half(x, b + 64, groups, sums + 16);
}
#else
inline void weight_only(const float* x, const int8_t* b, int64_t groups, float* sums) {
  float s[kGroup][kPanel] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
    for (int j = 0; j < kGroup; ++j) {
      for (int n = 0; n < kPanel; ++n) {
        s[j][n] = __builtin_fmaf(x[j], static_cast<float>(b[n * kGroup + j]), s[j][n]);
      }
    }
  }
  for (int n = 0; n < kPanel; ++n) sums[n] = (s[0][n] + s[1][n]) + (s[2][n] + s[3][n]);
}
#endif

}  // namespace
}  // namespace qfx::cpu
