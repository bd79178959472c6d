// Quantization of a row of floats, to the nearest code and stochastically. (Q3) (Q6) (Q7)
#pragma once

#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/windows.h"

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
inline __m512i integers_of_16(__m512 x, __m512 inverse) {
  __m512 v = _mm512_mul_ps(x, inverse);
  if constexpr (kFar) {
    v = _mm512_max_ps(_mm512_set1_ps(-1024.f), v);
    v = _mm512_min_ps(_mm512_set1_ps(1024.f), v);
  }
  return _mm512_cvtps_epi32(v);
}

// The codes of four vectors, the i-th of which is load(i).
template <bool kFar, typename Load>
inline __m512i codes_of_64(const RowCode& code, const Load& load) {
  const __m512 inverse = _mm512_set1_ps(code.inverse);
  const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(code.zero_point));
  const auto pair = [&](int i) {
    const __m512i v = _mm512_packs_epi32(integers_of_16<kFar>(load(i), inverse),
                                         integers_of_16<kFar>(load(i + 1), inverse));
    return _mm512_add_epi16(v, zero);
  };
  // The packing instructions saturate, which clamps to 8 bits, and work in lanes of 16 bytes.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i v = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(pair(0), pair(2)));
  v = _mm512_max_epi8(v, _mm512_set1_epi8(static_cast<char>(code.qmin)));
  return _mm512_min_epi8(v, _mm512_set1_epi8(static_cast<char>(code.qmax)));
}

template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  const auto load = [&](int i) { return _mm512_loadu_ps(x + 16 * i); };
  _mm512_storeu_si512(q, codes_of_64<kFar>(code, load));
}

// The first n < kBlock elements of a block.
template <bool kFar>
inline void quantize_rest(const float* x, int64_t n, const RowCode& code, int8_t* q) {
  const uint64_t there = (uint64_t{1} << n) - 1;
  const auto load = [&](int i) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(there >> 16 * i), x + 16 * i);
  };
  _mm512_mask_storeu_epi8(q, there, codes_of_64<kFar>(code, load));
}
#elif defined(__AVX2__)
template <bool kFar>
inline __m256i codes_of_8(__m256 x, const RowCode& code) {
  __m256 v = _mm256_mul_ps(x, _mm256_set1_ps(code.inverse));
  if constexpr (kFar) {
    v = _mm256_max_ps(_mm256_set1_ps(-1024.f), v);
    v = _mm256_min_ps(_mm256_set1_ps(1024.f), v);
  }
  return _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(code.zero_point));
}

// The codes of four vectors, the i-th of which is load(i).
template <bool kFar, typename Load>
inline __m256i codes_of_32(const RowCode& code, const Load& load) {
  // The packing instructions saturate, which clamps to 8 bits, and work in halves of 16 bytes.
  const auto pair = [&](int i) {
    return _mm256_packs_epi32(codes_of_8<kFar>(load(i), code), codes_of_8<kFar>(load(i + 1), code));
  };
  __m256i v = _mm256_packs_epi16(pair(0), pair(2));
  v = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  v = _mm256_max_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmin)));
  return _mm256_min_epi8(v, _mm256_set1_epi8(static_cast<char>(code.qmax)));
}

template <bool kFar>
inline void quantize_block(const float* x, const RowCode& code, int8_t* q) {
  const auto load = [&](int i) { return _mm256_loadu_ps(x + 8 * i); };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes_of_32<kFar>(code, load));
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

#if !defined(__AVX512BW__)
template <bool kFar>
inline void quantize_rest(const float* x, int64_t n, const RowCode& code, int8_t* q) {
  float rest[kBlock] = {};
  int8_t codes[kBlock];
  __builtin_memcpy(rest, x, n * sizeof(float));
  quantize_block<kFar>(rest, code, codes);
  __builtin_memcpy(q, codes, n);
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
  if (i < n) quantize_rest<kFar>(x + i, n - i, kept, q + i);
}

// Pieces of kPiece floats, the i-th at from[i] + offset, become codes that follow each other. (Q3)
inline void quantize_pieces(const float* const* from, int64_t count, int64_t offset,
                            const RowCode& code, int8_t* q) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; code.finite && i + 4 <= count; i += 4) {
    const auto load = [&](int j) { return _mm512_loadu_ps(from[i + j] + offset); };
    _mm512_storeu_si512(q + kPiece * i, codes_of_64<false>(code, load));
  }
#elif defined(__AVX2__)
  for (; code.finite && i + 2 <= count; i += 2) {
    const auto load = [&](int j) { return _mm256_loadu_ps(from[i + j / 2] + offset + j % 2 * 8); };
    const __m256i codes = codes_of_32<false>(code, load);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + kPiece * i), codes);
  }
#endif
  for (; i < count; ++i) quantize_any<false>(from[i] + offset, kPiece, &code, q + kPiece * i);
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
