// R of blocks that stay in vector registers, for AVX2 and AVX-512. (R1)
// A stage within a vector is one permutation and one fused multiply-add with signs, which rounds
// like an addition; a stage between vectors is additions and subtractions. All is unrolled.
#pragma once

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/rows/rotate_stages.h"
#include "cpu/kernels/rows/vector.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own
namespace wide {

// Lane i of the result is lane i ^ h of v.
#if defined(__AVX512BW__)
template <int h>
inline Vector partner(Vector v) {
  if constexpr (h == 1) return _mm512_permute_ps(v, 0xb1);
  if constexpr (h == 2) return _mm512_permute_ps(v, 0x4e);
  if constexpr (h == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  if constexpr (h == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);
}
#else
template <int h>
inline Vector partner(Vector v) {
  if constexpr (h == 1) return _mm256_permute_ps(v, 0xb1);
  if constexpr (h == 2) return _mm256_permute_ps(v, 0x4e);
  if constexpr (h == 4) return _mm256_permute2f128_ps(v, v, 1);
}
#endif

// The signs of stage h in a vector whose first element is `first`.
template <int h, bool kBack>
struct Signs {
  alignas(64) float of[2][kLanes];  // of vectors at even and at odd places

  constexpr Signs() : of() {
    for (int i = 0; i < 2 * kLanes; ++i) {
      of[i / kLanes][i % kLanes] = takes_off<kBack>(i, h) ? -1.f : 1.f;
    }
  }
};
template <int h, bool kBack>
constexpr Signs<h, kBack> kSigns;

template <int kVectors, int h, bool kBack>
inline void stage(Vector* v) {
  if constexpr (h < kLanes) {
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      v[i] = multiply_add(partner<h>(v[i]), load(kSigns<h, kBack>.of[i % 2]), v[i]);
    }
  } else {
    constexpr int kStep = h / kLanes;
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      if (i & kStep) continue;
      const Vector a = v[i], b = v[i + kStep];
      const int first = i * kLanes, second = (i + kStep) * kLanes;
      v[i] = takes_off<kBack>(first, h) ? subtract(a, b) : add(a, b);
      v[i + kStep] = takes_off<kBack>(second, h) ? subtract(b, a) : add(b, a);
    }
  }
}

// Stage h and those after it.
template <int kBlock, bool kBack, int h>
inline void stages_from(Vector* v) {
  stage<kBlock / kLanes, h, kBack>(v);
  if constexpr (kBack ? h > 1 : 2 * h < kBlock)
    stages_from<kBlock, kBack, kBack ? h / 2 : 2 * h>(v);
}

template <int kBlock, bool kBack>
inline void stages(Vector* v) {
  stages_from<kBlock, kBack, kBack ? kBlock / 2 : 1>(v);
}

template <int kBlock, bool kBack, bool kFactor>
inline WideExtremes rotate_vectors(const float* x, int64_t n, const float* factor, float* out) {
  constexpr int kVectors = kBlock / kLanes;
  WideExtremes extremes;
  for (int64_t k = 0; k < n; k += kBlock) {
    Vector v[kVectors];
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = k + i * kLanes;
      v[i] = load(x + at);
      if constexpr (kFactor && !kBack) v[i] = multiply(v[i], load(factor + at));
    }
    stages<kBlock, kBack>(v);
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = k + i * kLanes;
      v[i] = multiply(v[i], all(kInverseRoot<kBlock>));
      if constexpr (kFactor && kBack) v[i] = multiply(v[i], load(factor + at));
      if constexpr (!kBack) extremes.include(bits_of(v[i]));
      store(out + at, v[i]);
    }
  }
  return extremes;
}

template <int kBlock, bool kBack>
inline Range rotate_blocks(const float* x, int64_t n, const float* factor, float* out) {
  if (factor == nullptr) {
    return range_between(rotate_vectors<kBlock, kBack, false>(x, n, factor, out).reduced());
  }
  return range_between(rotate_vectors<kBlock, kBack, true>(x, n, factor, out).reduced());
}

}  // namespace wide

}  // namespace
}  // namespace qfx::cpu
