// As softmax_plain.h, in vector registers of AVX2 and AVX-512. (A4), (A5)
#pragma once

#include "cpu/kernels/rows/softmax_mask.h"
#include "cpu/kernels/rows/vector.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own
namespace wide {

constexpr int kVectors = kPanel / kLanes;  // of a panel

// 32 become 1: the halves are joined until one is left.
template <Vector join(Vector, Vector)>
inline float by_halves(const Vector* x) {
#if defined(__AVX512BW__)
  Vector v = join(x[1], x[0]);
  v = join(_mm512_shuffle_f32x4(v, v, 0x4e), v);
  v = join(_mm512_shuffle_f32x4(v, v, 0xb1), v);
  v = join(_mm512_permute_ps(v, 0x4e), v);
  v = join(_mm512_permute_ps(v, 0xb1), v);
  return _mm512_cvtss_f32(v);
#else
  Vector v = join(join(x[3], x[1]), join(x[2], x[0]));
  v = join(_mm256_permute2f128_ps(v, v, 1), v);
  v = join(_mm256_permute_ps(v, 0x4e), v);
  v = join(_mm256_permute_ps(v, 0xb1), v);
  return _mm256_cvtss_f32(v);
#endif
}

// Minus infinity where the row does not see a key, the mask added elsewhere; the greatest.
inline float top_of_row(const SoftmaxArgs* args) {
  Vector top[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) top[i] = all(-kInfinity);
  for (int64_t first = 0; first < args->keys; first += kPanel) {
    float* t = args->scores + first;
    if (args->mask != nullptr) add_mask(t, args->mask + first);
    if (args->keys - first < kPanel) hide_from(static_cast<int>(args->keys - first), t);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) top[i] = larger(load(t + i * kLanes), top[i]);
  }
  return by_halves<larger>(top);
}

// e^x for x <= 0, 0 below e^-60, NaN for NaN.
inline Vector weight_of(Vector x) {
  const Vector log2e = all(1.44269504088896341f), round = all(12582912.f + 127);
  const Vector shifted = multiply_add(x, log2e, round);
  const Vector f = multiply_add(x, log2e, subtract(round, shifted));
  Vector p = all(0.001326472032815218f);
  p = multiply_add(p, f, all(0.009671512991189957f));
  p = multiply_add(p, f, all(0.05550733581185341f));
  p = multiply_add(p, f, all(0.24022242426872253f));
  p = multiply_add(p, f, all(0.6931470036506653f));
  p = multiply_add(p, f, all(1.f));
  return product_unless_below(x, all(-60.f), p, exponent_from_last_bits(shifted));
}

inline SoftmaxSums softmax_row(const SoftmaxArgs* args) {
  const float greatest = top_of_row(args);
  const Vector top = all(greatest == -kInfinity ? 0.f : greatest);
  Vector sum[kVectors], most[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) sum[i] = most[i] = all(0.f);
  float* u = args->scores;
  int64_t first = 0;
  for (; first < args->keys; first += kPanel) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = first + i * kLanes;
      const Vector w = weight_of(subtract(load(u + at), top));
      const Vector v = multiply(w, load(args->value_scale + at));
      sum[i] = add(sum[i], w);
      most[i] = larger(v, most[i]);
      store(u + at, v);
    }
  }
  for (; first < args->width; ++first) u[first] = 0.f;
  const float largest = by_halves<larger>(most);
  return {by_halves<add>(sum), largest > 0x1p-100f ? largest : 0x1p-100f};
}

#if defined(__AVX512BW__)
inline __m512i words_of(const float* u, __m512 factor) {
  const __m512i first =
      _mm512_setr_epi32(0x00020000, 0x00060004, 0x000a0008, 0x000e000c, 0x00120010, 0x00160014,
                        0x001a0018, 0x001e001c, 0x00220020, 0x00260024, 0x002a0028, 0x002e002c,
                        0x00320030, 0x00360034, 0x003a0038, 0x003e003c);
  const __m512 round = all(12582912.f);
  const __m512 a = _mm512_fmadd_ps(load(u), factor, round);
  const __m512 b = _mm512_fmadd_ps(load(u + 16), factor, round);
  return _mm512_permutex2var_epi16(bits_of(a), first, bits_of(b));
}

inline void probabilities_of_row(const float* u, int64_t width, float factor, uint8_t offset,
                                 uint8_t* high, uint8_t* low) {
  const __m512i added = _mm512_set1_epi8(static_cast<char>(offset));
  const __m512 scale = all(factor);
  for (int64_t first = 0; first < width; first += kPanel) {
    const __m512i words = words_of(u + first, scale);
    const __m512i tops = _mm512_add_epi8(_mm512_srli_epi16(words, 8), added);
    const __m512i rest = _mm512_add_epi8(words, added);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + first), _mm512_cvtepi16_epi8(tops));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + first), _mm512_cvtepi16_epi8(rest));
  }
}
#else
inline __m256i words_of(const float* u, __m256 factor) {
  const __m256i low_words = _mm256_set1_epi32(0xffff);
  const __m256 round = all(12582912.f);
  const __m256i a = bits_of(_mm256_fmadd_ps(load(u), factor, round));
  const __m256i b = bits_of(_mm256_fmadd_ps(load(u + 8), factor, round));
  // The packing instructions work in halves of 16 bytes.
  return _mm256_packus_epi32(_mm256_and_si256(a, low_words), _mm256_and_si256(b, low_words));
}

inline void probabilities_of_row(const float* u, int64_t width, float factor, uint8_t offset,
                                 uint8_t* high, uint8_t* low) {
  const __m256i added = _mm256_set1_epi8(static_cast<char>(offset));
  const __m256i low_bytes = _mm256_set1_epi16(0xff);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256 scale = all(factor);
  const auto put = [&](uint8_t* out, __m256i a, __m256i b) {
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_add_epi8(bytes, added));
  };
  for (int64_t first = 0; first < width; first += kPanel) {
    const __m256i a = words_of(u + first, scale), b = words_of(u + first + 16, scale);
    put(high + first, _mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    put(low + first, _mm256_and_si256(a, low_bytes), _mm256_and_si256(b, low_bytes));
  }
}
#endif

}  // namespace wide

using wide::probabilities_of_row;
using wide::softmax_row;

}  // namespace
}  // namespace qfx::cpu
