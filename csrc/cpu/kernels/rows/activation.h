// Activations on one float, without branches, so that compilers vectorize a loop over them, or on a
// vector (F) that has these operations. (E2)
// The same IEEE operations in the same order on every instruction set give the same bits; fused
// multiply-adds are written out, never left to the compiler.
// Error against float64 on a dense sweep: about 2.5 * 2^-24 * max(1, |v|); tests bound it.
#pragma once

#include "types.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline float select(bool condition, float yes, float no) { return condition ? yes : no; }

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float absolute(float x) { return __builtin_fabsf(x); }

inline constexpr float kShift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^n of n + kShift; n = 128 is infinity.
inline float power_of_two(float shifted) {
  const uint32_t exponent =
      __builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, kShift) + 127;
  return __builtin_bit_cast(float, exponent << 23);
}

// e^x for x in [-80, 88], infinity above 88.4, e^-80 below: denormal numbers would be slow.
// x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7, error 5e-9.
template <typename F>
inline F exp_of(F x) {
  const F bounded = select(x > 89.f, 89.f, select(x < -80.f, -80.f, x));
  const F shifted = fma(bounded, 1.44269504088896341f, kShift);
  const F n = shifted - kShift;
  const F r = fma(n, -1.42860682030941723e-6f, fma(n, -0.693145751953125f, bounded));
  F p = 1.f / 5040;
  p = fma(p, r, 1.f / 720);
  p = fma(p, r, 1.f / 120);
  p = fma(p, r, 1.f / 24);
  p = fma(p, r, 1.f / 6);
  p = fma(p, r, 0.5f);
  p = fma(p, r, 1.f);
  p = fma(p, r, 1.f);
  return p * power_of_two(shifted);
}

// v * sigmoid(u)
template <typename F>
inline F gated(F v, F u) {
  return v / (1.f + exp_of(-u));
}

// The activations, each under the name of its row in activations.inc. (E2)
namespace activations {

template <typename F>
inline F none(F v) {
  return v;
}

template <typename F>
inline F relu(F v) {
  return select(v < 0.f, 0.f, v);
}

template <typename F>
inline F gelu(F v) {
  // Phi(-a) = 1/2 - a P(s), s = 2 (a / 5.2)^2 - 1: P of degree 14, fitted to the least greatest
  // error of Phi on 0 <= a <= 5.2, 1.3e-8. Beyond, where Phi(-a) < 1e-7, it counts as 0. No
  // division and no exp: 0.6 of the time of erfc's form.
  constexpr float kEnd = 5.2f;
  const F a = absolute(v);
  const F s = fma(a * a, 2.f / (kEnd * kEnd), -1.f);
  F p = 0.00020238966681063175f;
  p = fma(p, s, -0.0005622903117910028f);
  p = fma(p, s, 0.0006007602205500007f);
  p = fma(p, s, -0.0009785158326849341f);
  p = fma(p, s, 0.0026624419260770082f);
  p = fma(p, s, -0.005067367572337389f);
  p = fma(p, s, 0.008010090328752995f);
  p = fma(p, s, -0.01235335972160101f);
  p = fma(p, s, 0.018133923411369324f);
  p = fma(p, s, -0.024763450026512146f);
  p = fma(p, s, 0.0319623239338398f);
  p = fma(p, s, -0.03992539644241333f);
  p = fma(p, s, 0.05002611130475998f);
  p = fma(p, s, -0.06774380803108215f);
  p = fma(p, s, 0.1359499841928482f);
  const F tail = select(a < kEnd, fma(-a, p, 0.5f), 0.f);
  return v * select(v < 0.f, tail, 1.f - tail);
}

template <typename F>
inline F gelu_tanh(F v) {
  // v/2 (1 + tanh(u)) = v sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3)
  return gated(v, 1.59576912160573071f * fma(0.044715f * v, v * v, v));
}

template <typename F>
inline F silu(F v) {
  return gated(v, v);
}

template <typename F>
inline F quick_gelu(F v) {
  return gated(v, 1.702f * v);
}

template <typename F>
inline F relu6(F v) {
  return select(v > 6.f, 6.f, select(v < 0.f, 0.f, v));
}

template <typename F>
inline F hardswish(F v) {
  return v * relu6(v + 3.f) / 6.f;
}

}  // namespace activations

template <Activation A, typename F>
inline F activate(F v) {
#define QFX_ACTIVATION(value, name, in_float) \
  if constexpr (A == Activation::value) return activations::name(v);
#include "activations.inc"
#undef QFX_ACTIVATION
}

// Calls use(ActivationValue<...>{}): what is compiled for the activation.
template <typename Use>
inline void with_activation(Activation activation, const Use& use) {
  switch (activation) {
#define QFX_ACTIVATION(value, name, in_float) \
  case Activation::value:                     \
    return use(ActivationValue<Activation::value>{});
#include "activations.inc"
#undef QFX_ACTIVATION
  }
}

}  // namespace
}  // namespace qfx::cpu
