// 16 floats as one value, with the operations that rows/activation.h requires.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/rows/activation.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

struct Floats16 {
  __m512 v;

  Floats16() = default;
  Floats16(__m512 vector) : v(vector) {}
  Floats16(float x) : v(_mm512_set1_ps(x)) {}
};

struct Which16 {
  __mmask16 of;
};

#define QFX_INLINE inline __attribute__((always_inline))

QFX_INLINE Floats16 operator+(Floats16 a, Floats16 b) { return _mm512_add_ps(a.v, b.v); }
QFX_INLINE Floats16 operator-(Floats16 a, Floats16 b) { return _mm512_sub_ps(a.v, b.v); }
QFX_INLINE Floats16 operator*(Floats16 a, Floats16 b) { return _mm512_mul_ps(a.v, b.v); }
QFX_INLINE Floats16 operator/(Floats16 a, Floats16 b) { return _mm512_div_ps(a.v, b.v); }
QFX_INLINE Floats16 operator-(Floats16 a) { return _mm512_xor_ps(a.v, _mm512_set1_ps(-0.f)); }
QFX_INLINE Which16 operator<(Floats16 a, Floats16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
QFX_INLINE Which16 operator>(Floats16 a, Floats16 b) { return b < a; }
QFX_INLINE Floats16 select(Which16 which, Floats16 yes, Floats16 no) {
  return _mm512_mask_blend_ps(which.of, no.v, yes.v);
}
QFX_INLINE Floats16 fma(Floats16 a, Floats16 b, Floats16 c) {
  return _mm512_fmadd_ps(a.v, b.v, c.v);
}
QFX_INLINE Floats16 absolute(Floats16 x) { return _mm512_abs_ps(x.v); }
QFX_INLINE Floats16 power_of_two(Floats16 shifted) {
  const int32_t bias = 127 - __builtin_bit_cast(int32_t, kShift);
  const __m512i exponent =
      _mm512_add_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(bias));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
