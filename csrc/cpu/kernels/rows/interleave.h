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

#if defined(__AVX512VNNI__)
// 16 bytes of each of four rows that lie `step` bytes apart.
inline __m512i quarters(const int8_t* codes, int64_t step) {
  const auto at = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i * step));
  };
  __m512i v = _mm512_castsi128_si512(at(0));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, at(1));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, at(2));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, at(3));
}

// Adds the four bytes of each word to its sum.
inline __m512i add_bytes(__m512i sum, __m512i words) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), words);
}

// codes[32][stride] of keys -> out[groups][32][4], the feature contracted; sums over the features.
// 8 divides `groups`.
inline void interleave_keys(const int8_t* codes, int64_t stride, int64_t groups, int8_t* out,
                            int32_t* sums) {
  constexpr int kLine = 16;  // keys
  for (int n = 0; n < kPanel; n += kLine) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g += 4) {
      const int8_t* from = codes + n * stride + g * kGroup;
      int8_t* to = out + (g * kPanel + n) * kGroup;
      const __m512i a = quarters(from, 4 * stride), b = quarters(from + stride, 4 * stride);
      const __m512i c = quarters(from + 2 * stride, 4 * stride);
      const __m512i d = quarters(from + 3 * stride, 4 * stride);
      const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
      const __m512i low2 = _mm512_unpacklo_epi32(c, d), high2 = _mm512_unpackhi_epi32(c, d);
      const __m512i words[4] = {_mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
                                _mm512_unpacklo_epi64(high, high2),
                                _mm512_unpackhi_epi64(high, high2)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sum = add_bytes(sum, words[i]);
        _mm512_storeu_si512(to + i * kPanel * kGroup, words[i]);
      }
    }
    _mm512_storeu_si512(sums + n, sum);
  }
}

// Four rows of 16 bytes -> a word of each column.
inline __m512i words_of_columns(__m512i rows) {
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i in_words =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(turn, rows), in_words);
}

// codes[32][stride] of values, 32 features of them -> out[8][32][4], the value contracted; sums
// over the values.
inline void interleave_values(const int8_t* codes, int64_t stride, int8_t* out, int32_t* sums) {
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int i = 0; i < kPanel; i += kGroup, codes += kGroup * stride) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, out += 64) {
      const __m512i words = words_of_columns(quarters(codes + 16 * half, stride));
      sum[half] = add_bytes(sum[half], words);
      _mm512_storeu_si512(out, words);
    }
  }
  _mm512_storeu_si512(sums, sum[0]);
  _mm512_storeu_si512(sums + 16, sum[1]);
}
#else
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

#if defined(__AVX2__)
// Four rows of 32 bytes -> a word of each column, in out[32][4]; adds their bytes to sums[32].
inline void turn_rows(const int8_t* codes, int64_t stride, int8_t* out, __m256i* sums) {
  const auto row = [&](int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i * stride));
  };
  const __m256i low = _mm256_unpacklo_epi8(row(0), row(1)),
                low2 = _mm256_unpacklo_epi8(row(2), row(3));
  const __m256i high = _mm256_unpackhi_epi8(row(0), row(1)),
                high2 = _mm256_unpackhi_epi8(row(2), row(3));
  const __m256i a = _mm256_unpacklo_epi16(low, low2), b = _mm256_unpackhi_epi16(low, low2);
  const __m256i c = _mm256_unpacklo_epi16(high, high2), d = _mm256_unpackhi_epi16(high, high2);
  const __m256i words[4] = {
      _mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(c, d, 0x20),
      _mm256_permute2x128_si256(a, b, 0x31), _mm256_permute2x128_si256(c, d, 0x31)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), words[i]);
    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, words[i]);
  }
}

// codes[32][stride] of values, 32 features of them -> out[8][32][4], the value contracted; sums
// over the values.
inline void interleave_values(const int8_t* codes, int64_t stride, int8_t* out, int32_t* sums) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum[4] = {zero, zero, zero, zero};
  for (int i = 0; i < kPanel; i += kGroup) {
    turn_rows(codes + i * stride, stride, out + i * kPanel, sum);
  }
  for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums) + i, sum[i]);
}
#else
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
#endif
#endif

}  // namespace
}  // namespace qfx::cpu
