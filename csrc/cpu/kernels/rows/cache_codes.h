// Codes of a cache in vector registers, as floats.
#pragma once

#include "cpu/kernels/rows/decode.h"
#include "cpu/kernels/tables/cache.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int kMostRows = 4;  // that share codes in registers
// The prefetch distance is 8192 bytes, into the second cache: with 4096 bytes, into the first,
// reading from memory took a tenth longer on a Xeon with AMX.
inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* codes) {
  constexpr int64_t kAhead = 8192;
  constexpr int kToRead = 0, kSecondCache = 2;
  __builtin_prefetch(codes + kAhead, kToRead, kSecondCache);
}

// How many vectors of sums there is room for, beside the codes.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRoom = 24;
#else
constexpr int kRoom = 12;
#endif

inline int64_t rows_at_once(int64_t left) { return left < kMostRows ? left : kMostRows; }

// a b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kFloats; ++i) c[i] = fma(a[i], b[i], c[i]);
  return c;
#endif
}

inline Floats all_of(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_set1_ps(x);
#else
  Floats v;
  for (int i = 0; i < kFloats; ++i) v[i] = x;
  return v;
#endif
}

// kFloats codes of 8 bits.
inline Floats signed_codes(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Floats v;
  for (int i = 0; i < kFloats; ++i) v[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
  return v;
#endif
}

// The lower and the upper halves of kFloats bytes.
inline void halves(const uint8_t* codes, Floats* lower, Floats* upper) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  *lower = _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)));
  *upper = _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  *lower = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
  *upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4));
#else
  for (int i = 0; i < kFloats; ++i) {
    (*lower)[i] = static_cast<float>(codes[i] & 15);
    (*upper)[i] = static_cast<float>(codes[i] >> 4);
  }
#endif
}

// Runs what is compiled for so many rows.
template <typename F>
inline void by_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

}  // namespace
}  // namespace qfx::cpu
