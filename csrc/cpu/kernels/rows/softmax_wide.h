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

inline void score_panels(const ScoreArgs* given) {
  const ScoreArgs args = *given;
  alignas(64) uint32_t zero[kPanelsScored * kPanel];
  for (int64_t n = 0; n < args.panels * kPanel; ++n) {
    zero[n] = static_cast<uint32_t>(args.mul) * static_cast<uint32_t>(args.colsum[n]);
  }
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* mask = args.mask[r];
    const Integers added = all(args.add[r]);
    const Vector row_scale = all(args.row_scale[r]);
    const int64_t keys = args.keys[r] - args.first;
    const int32_t* raw = args.raw + r * kPanel;
    float* out = args.out + r * args.stride;
    Vector top[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) top[i] = load(args.top + r * kPanel + i * kLanes);
    for (int64_t n = 0; n < args.panels * kPanel && n < keys; n += kPanel) {
      Vector t[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const int64_t at = n + i * kLanes;
        const Integers acc = subtract(add(load(raw + i * kLanes), added), load(zero + at));
        t[i] = multiply(floats_of(acc), multiply(row_scale, load(args.key_scale + at)));
        store(out + at, t[i]);
      }
      if (mask != nullptr || keys - n < kPanel) {
        if (mask != nullptr) add_mask(out + n, mask + args.first + n);
        if (keys - n < kPanel) hide_from(static_cast<int>(keys - n), out + n);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) t[i] = load(out + n + i * kLanes);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) top[i] = larger(t[i], top[i]);
      raw += args.rows * kPanel;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(args.top + r * kPanel + i * kLanes, top[i]);
  }
}

inline void greatest_of_rows(const float* top, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; ++r, top += kPanel) {
    Vector x[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) x[i] = load(top + i * kLanes);
    out[r] = by_halves<larger>(x);
  }
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
  const Vector top = all(args->greatest == -kInfinity ? 0.f : args->greatest);
  Vector sum[kVectors], most[kVectors], low[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) sum[i] = most[i] = low[i] = all(0.f);
  const float *scale = args->value_scale, *minimum = args->minimum;
  float* u = args->scores;
  const int64_t keys = args->keys;
  int64_t first = 0;
  for (; first < keys; first += kPanel) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = first + i * kLanes;
      const Vector w = weight_of(subtract(load(u + at), top));
      const Vector v = multiply(w, load(scale + at));
      sum[i] = add(sum[i], w);
      if (minimum != nullptr) low[i] = add(low[i], multiply(w, load(minimum + at)));
      most[i] = larger(v, most[i]);
      store(u + at, v);
    }
  }
  for (; first < args->width; ++first) u[first] = 0.f;
  const float largest = by_halves<larger>(most);
  return {by_halves<add>(sum), largest > 0x1p-100f ? largest : 0x1p-100f, by_halves<add>(low)};
}

inline void score_gradient_of_row(const ScoreGradientArgs* args) {
  const Vector smallest = all(0x1p-126f);
  Vector sum[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) sum[i] = all(0.f);
  for (int64_t first = 0; first < args->width; first += kPanel) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vector w = load(args->weights + first + i * kLanes);
      const Vector y = load(args->products + first + i * kLanes);
      sum[i] = add(sum[i], product_unless_below(w, smallest, w, y));
    }
  }
  const Vector mean = all(by_halves<add>(sum) * args->inverse);
  for (int64_t n = 0; n < args->width; n += kLanes) {
    const Vector w = load(args->weights + n), y = subtract(load(args->products + n), mean);
    store(args->products + n, product_unless_below(w, smallest, w, y));
  }
}

#if defined(__AVX512BW__)
// The two bytes of 64 codes, or of 32 and the same once more; code n lies in word n mod 16.
struct Bytes {
  __m512i high, low;
};

template <int kCount>
inline Bytes bytes_of(const float* u, __m512 factor) {
  const auto code = [&](int i) {
    const float* from = u + i * 16 % kCount;
    return bits_of(_mm512_fmadd_ps(load(from), factor, all(12582912.f)));
  };
  constexpr __mmask32 kOddWords = 0xaaaaaaaa;
  constexpr __mmask64 kOddBytes = 0xaaaaaaaaaaaaaaaa;
  const __m512i even = _mm512_mask_blend_epi16(kOddWords, code(0), _mm512_slli_epi32(code(2), 16));
  const __m512i odd = _mm512_mask_blend_epi16(kOddWords, code(1), _mm512_slli_epi32(code(3), 16));
  return {_mm512_mask_blend_epi8(kOddBytes, _mm512_srli_epi16(even, 8), odd),
          _mm512_mask_blend_epi8(kOddBytes, even, _mm512_slli_epi16(odd, 8))};
}

inline void probabilities_of_row(const float* u, int64_t width, float factor, uint8_t offset,
                                 uint8_t* high, uint8_t* low) {
  const __m512i added = _mm512_set1_epi8(static_cast<char>(offset));
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i of_words =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512 scale = all(factor);
  const auto in_order = [&](__m512i bytes) {
    const __m512i turned = _mm512_permutexvar_epi32(turn, _mm512_shuffle_epi8(bytes, of_words));
    return _mm512_add_epi8(turned, added);
  };
  int64_t n = 0;
  for (; n + 2 * kPanel <= width; n += 2 * kPanel) {
    const Bytes bytes = bytes_of<2 * kPanel>(u + n, scale);
    _mm512_storeu_si512(high + n, in_order(bytes.high));
    _mm512_storeu_si512(low + n, in_order(bytes.low));
  }
  if (n == width) return;
  const Bytes bytes = bytes_of<kPanel>(u + n, scale);
  const auto half = [&](__m512i all) { return _mm512_castsi512_si256(in_order(all)); };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + n), half(bytes.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + n), half(bytes.low));
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

using wide::greatest_of_rows;
using wide::probabilities_of_row;
using wide::score_gradient_of_row;
using wide::score_panels;
using wide::softmax_row;

}  // namespace
}  // namespace qfx::cpu
