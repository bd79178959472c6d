// Quantization of a row of floats, to the nearest code and stochastically. (Q3) (Q6) (Q7)
#pragma once

#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/tables/rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// rne(x * inverse) + zero_point of kBlock elements, clamped to [qmin, qmax]. kFar: x * inverse may
// be anything and is first clamped to +-1024; else |x * inverse| <= qmax - qmin + 1.
#if defined(__AVX512BW__)
constexpr int kBlock = 64;
#else
constexpr int kBlock = 32;
#endif

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
inline __m512i integers_of_16(const float* x, __m512 inverse) {
  __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x), inverse);
  if constexpr (kFar) {
    v = _mm512_max_ps(_mm512_set1_ps(-1024.f), v);
    v = _mm512_min_ps(_mm512_set1_ps(1024.f), v);
  }
  return _mm512_cvtps_epi32(v);
}

template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  const __m512 inverse = _mm512_set1_ps(code.inverse);
  const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(code.zero_point));
  const auto pair = [&](const float* from) {
    const __m512i v = _mm512_packs_epi32(integers_of_16<kFar>(from, inverse),
                                         integers_of_16<kFar>(from + 16, inverse));
    return _mm512_add_epi16(v, zero);
  };
  // The packing instructions saturate, which clamps to 8 bits, and work in lanes of 16 bytes.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i v = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(pair(x), pair(x + 32)));
  v = _mm512_max_epi8(v, _mm512_set1_epi8(static_cast<char>(code.qmin)));
  v = _mm512_min_epi8(v, _mm512_set1_epi8(static_cast<char>(code.qmax)));
  _mm512_storeu_si512(q, v);
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

}  // namespace
}  // namespace qfx::cpu
