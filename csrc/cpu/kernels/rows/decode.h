// Float attention of one query: each key and each value is read once. (A7) to (A9)
// The same operations in the same order on every instruction set; 16 sums run side by side.
#pragma once

#include <cstdint>

#include "cpu/kernels/rows/activation.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int kSums = 16;
#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(kFloats * sizeof(float))));

inline Floats load(const float* x) {
  Floats v;
  __builtin_memcpy(&v, x, sizeof(v));
  return v;
}

// s[0] + .. + s[15]: halves are added until one is left.
inline float total(float* s) {
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
  }
  return s[0];
}

// scores[n] = (q . k[n]) * scale: feature i goes to sum i mod 16.                           (A7)
inline void score_keys(const float* q, const float* k, int64_t stride, int64_t keys, int64_t d,
                       float scale, float* scores) {
  for (int64_t n = 0; n < keys; ++n, k += stride) {
    Floats sums[kSums / kFloats] = {};
    int64_t i = 0;
    for (; i + kSums <= d; i += kSums) {
#pragma GCC unroll 4
      for (int v = 0; v < kSums / kFloats; ++v) {
        sums[v] = sums[v] + load(q + i + v * kFloats) * load(k + i + v * kFloats);
      }
    }
    float s[kSums];
    __builtin_memcpy(s, sums, sizeof(s));
    for (int rest = 0; i < d; ++i, ++rest) s[rest] = s[rest] + q[i] * k[i];
    scores[n] = total(s) * scale;
  }
}

// scores[n] -> exp(scores[n] - top), 0 below e^-80, and returns their sum; `keys` is padded to
// whole panels with minus infinity.                                                        (A8)
inline float exponentials(float* scores, int64_t keys, float top) {
  float sums[kSums] = {};
  for (int64_t n = 0; n < keys; n += kSums) {
    for (int i = 0; i < kSums; ++i) {
      const float t = scores[n + i] - top, p = select(t < -80.f, 0.f, exp_of(t));
      scores[n + i] = p;
      sums[i] = sums[i] + p;
    }
  }
  return total(sums);
}

template <int kCount>
inline void mix_columns(const float* p, const float* v, int64_t stride, int64_t keys, float* y) {
  Floats sums[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sums[i] = load(y + i * kFloats);
  for (int64_t n = 0; n < keys; ++n, v += stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) sums[i] = sums[i] + p[n] * load(v + i * kFloats);
  }
  __builtin_memcpy(y, sums, sizeof(sums));
}

// y[e] = y[e] + p[n] v[n][e], in the order of n.                                           (A9)
inline void mix_values(const float* p, const float* v, int64_t stride, int64_t keys, int64_t e,
                       float* y) {
  constexpr int kWide = 8;
  int64_t i = 0;
  for (; i + kWide * kFloats <= e; i += kWide * kFloats) {
    mix_columns<kWide>(p, v + i, stride, keys, y + i);
  }
  for (; i + 4 * kFloats <= e; i += 4 * kFloats) {
    mix_columns<4>(p, v + i, stride, keys, y + i);
  }
  for (; i + kFloats <= e; i += kFloats) mix_columns<1>(p, v + i, stride, keys, y + i);
  for (; i < e; ++i) {
    for (int64_t n = 0; n < keys; ++n) y[i] = y[i] + p[n] * v[n * stride + i];
  }
}

}  // namespace
}  // namespace qfx::cpu
