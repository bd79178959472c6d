// One name for the operations on a vector of floats that AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own
namespace wide {

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
using Vector = __m512;
inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm512_storeu_ps(x, v); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512i bits_of(Vector v) { return _mm512_castps_si512(v); }

// a > b ? a : b, so b where one is NaN.
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
// 0 where x < limit, a * b elsewhere.
inline Vector product_unless_below(Vector x, Vector limit, Vector a, Vector b) {
  return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_US), a, b);
}
// The float whose exponent and sign are the last 9 bits of v's.
inline Vector exponent_from_last_bits(Vector v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits_of(v), 23));
}

using Integers = __m512i;
inline Integers load(const void* x) { return _mm512_loadu_si512(x); }
inline Integers all(int32_t x) { return _mm512_set1_epi32(x); }
inline Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers subtract(Integers a, Integers b) { return _mm512_sub_epi32(a, b); }
inline Vector floats_of(Integers v) { return _mm512_cvtepi32_ps(v); }
inline Integers no_magnitude() { return _mm512_setzero_si512(); }
// The greatest magnitudes as bits: NaN above infinity above all finite.
inline Integers larger_magnitude(Integers most, Vector v) {
  return _mm512_max_epi32(most, _mm512_and_si512(bits_of(v), _mm512_set1_epi32(0x7fffffff)));
}
// The greatest of each of four.
inline __m128i greatest_of_four(const Integers* m) {
  const Integers a =
      _mm512_max_epi32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
  const Integers b =
      _mm512_max_epi32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
  const Integers c = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m256i d = _mm256_max_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  return _mm_max_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}
#else
constexpr int kLanes = 8;
using Vector = __m256;
inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm256_storeu_ps(x, v); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256i bits_of(Vector v) { return _mm256_castps_si256(v); }

inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector product_unless_below(Vector x, Vector limit, Vector a, Vector b) {
  return _mm256_and_ps(_mm256_mul_ps(a, b), _mm256_cmp_ps(x, limit, _CMP_NLT_US));
}
inline Vector exponent_from_last_bits(Vector v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits_of(v), 23));
}

using Integers = __m256i;
inline Integers load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
inline Integers all(int32_t x) { return _mm256_set1_epi32(x); }
inline Integers add(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers subtract(Integers a, Integers b) { return _mm256_sub_epi32(a, b); }
inline Vector floats_of(Integers v) { return _mm256_cvtepi32_ps(v); }
inline Integers no_magnitude() { return _mm256_setzero_si256(); }
inline Integers larger_magnitude(Integers most, Vector v) {
  return _mm256_max_epi32(most, _mm256_and_si256(bits_of(v), _mm256_set1_epi32(0x7fffffff)));
}
inline __m128i greatest_of_four(const Integers* m) {
  const Integers a =
      _mm256_max_epi32(_mm256_unpacklo_epi32(m[0], m[1]), _mm256_unpackhi_epi32(m[0], m[1]));
  const Integers b =
      _mm256_max_epi32(_mm256_unpacklo_epi32(m[2], m[3]), _mm256_unpackhi_epi32(m[2], m[3]));
  const Integers c = _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  return _mm_max_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}
#endif

}  // namespace wide
}  // namespace
}  // namespace qfx::cpu
