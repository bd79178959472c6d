// Codes of attention's keys and values -> panels as pack.h says, 4 elements of the contracted axis
// side by side.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// 8 words of 8 keys -> out[8][32], a word of each key in a row.
inline void turn_words(const int8_t* codes, int64_t stride, uint32_t* out) {
#if defined(__AVX2__)
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i * stride));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i low = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
    const __m256i high = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * kPanel), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (i + 4) * kPanel), high);
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int g = 0; g < 8; ++g) {
      __builtin_memcpy(out + g * kPanel + i, codes + i * stride + g * kGroup, kGroup);
    }
  }
#endif
}

// The sum of the four bytes of a word.
inline int32_t sum_of_bytes(uint32_t word) {
  const auto byte = [](uint32_t from_top) { return static_cast<int32_t>(from_top) >> 24; };
  return byte(word << 24) + byte(word << 16) + byte(word << 8) + byte(word);
}

// codes[32][stride] of keys -> out[groups][32][4], the feature contracted; sums over the features.
// 8 divides `groups`.
inline void interleave_keys(const int8_t* codes, int64_t stride, int64_t groups, int8_t* out,
                            int32_t* sums) {
  int32_t sum[kPanel] = {};
  for (int64_t g = 0; g < groups; g += 8) {
    uint32_t words[8 * kPanel];
    for (int n = 0; n < kPanel; n += 8) {
      turn_words(codes + n * stride + g * kGroup, stride, words + n);
    }
    for (int i = 0; i < 8; ++i) {
      for (int n = 0; n < kPanel; ++n) sum[n] += sum_of_bytes(words[i * kPanel + n]);
    }
    __builtin_memcpy(out + g * kPanel * kGroup, words, sizeof(words));
  }
  for (int n = 0; n < kPanel; ++n) sums[n] = sum[n];
}

// codes[32][stride] of values, 32 features of them -> out[8][32][4], the value contracted; sums
// over the values.
inline void interleave_values(const int8_t* __restrict codes, int64_t stride,
                              int8_t* __restrict out, int32_t* __restrict sums) {
  int32_t sum[kPanel] = {};
  for (int i = 0; i < kPanel; ++i) {
    for (int n = 0; n < kPanel; ++n) sum[n] += codes[i * stride + n];
  }
  for (int n = 0; n < kPanel; ++n) sums[n] = sum[n];
  for (int g = 0; g < kPanel / kGroup; ++g, out += kPanel * kGroup) {
    const int8_t* row = codes + g * kGroup * stride;
    for (int n = 0; n < kPanel; ++n) {
      for (int i = 0; i < kGroup; ++i) out[n * kGroup + i] = row[i * stride + n];
    }
  }
}

}  // namespace
}  // namespace qfx::cpu
