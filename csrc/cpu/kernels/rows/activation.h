// silu and gelu on one float, without branches, so that compilers vectorize a loop over them. (E2)
// The same IEEE operations in the same order on every instruction set give the same bits; fused
// multiply-adds are written out, never left to the compiler.
// Error against float64 on a dense sweep: about 2 * 2^-24 * max(1, |v|); tests bound it.
#pragma once

#include "types.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline float select(bool condition, float yes, float no) { return condition ? yes : no; }

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// e^x for x in [-80, 88], infinity above 88.4, e^-80 below: denormal numbers would be slow.
// x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7, error 5e-9.
inline float exp_of(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float bounded = select(x > 89.f, 89.f, select(x < -80.f, -80.f, x));
  const float shifted = fma(bounded, 1.44269504088896341f, kRound);
  const float n = shifted - kRound;
  const float r = fma(n, -1.42860682030941723e-6f, fma(n, -0.693145751953125f, bounded));
  float p = 1.f / 5040;
  p = fma(p, r, 1.f / 720);
  p = fma(p, r, 1.f / 120);
  p = fma(p, r, 1.f / 24);
  p = fma(p, r, 1.f / 6);
  p = fma(p, r, 0.5f);
  p = fma(p, r, 1.f);
  p = fma(p, r, 1.f);
  const uint32_t exponent =
      __builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, kRound) + 127;
  return p * __builtin_bit_cast(float, exponent << 23);  // 2^n; n = 128 is infinity
}

// v * sigmoid(u)
inline float gated(float v, float u) { return v / (1.f + exp_of(-u)); }

inline float gelu_tanh(float v) {
  // v/2 (1 + tanh(u)) = v sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3)
  return gated(v, 1.59576912160573071f * fma(0.044715f * v, v * v, v));
}

inline float gelu(float v) {
  // erfc(z) e^(z^2) / 2 = t P(t), t = 1 / (1 + 0.35 z): P fitted by least squares of the relative
  // error on Chebyshev nodes of 0 <= z <= 14, error 1.2e-8.
  const float z = __builtin_fabsf(v) * 0.707106781186547524f;
  const float t = 1.f / fma(0.35f, z, 1.f);
  float p = 0.021337319165468216f;
  p = fma(p, t, -0.09110676497220993f);
  p = fma(p, t, 0.11820460855960846f);
  p = fma(p, t, -0.050631966441869736f);
  p = fma(p, t, 0.07422702759504318f);
  p = fma(p, t, 0.056456614285707474f);
  p = fma(p, t, 0.08134904503822327f);
  p = fma(p, t, 0.09271052479743958f);
  p = fma(p, t, 0.09871950000524521f);
  p = fma(p, t, 0.09873409569263458f);
  const float tail = p * t * exp_of(-(z * z));  // Phi(-|v|)
  return v * select(v < 0.f, tail, 1.f - tail);
}

template <Activation A>
inline float activate(float v) {
  if constexpr (A == Activation::kRelu) return select(v < 0.f, 0.f, v);
  if constexpr (A == Activation::kSilu) return gated(v, v);
  if constexpr (A == Activation::kGelu) return gelu(v);
  if constexpr (A == Activation::kGeluTanh) return gelu_tanh(v);
  return v;
}

}  // namespace
}  // namespace qfx::cpu
