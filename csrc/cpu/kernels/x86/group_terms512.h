// What becomes of 32 raw sums of a group, with 512-bit registers. (E3)
#pragma once

#include <immintrin.h>

#include "cpu/kernels/x86/group_columns.h"

namespace qfx::cpu {
namespace {

#define QFX_INLINE inline __attribute__((always_inline))

// Of 16 columns -colsum and, 16 bits higher, -zero.
QFX_INLINE __m512i negated_pairs(const int32_t* colsum, const int32_t* zero) {
  constexpr __mmask32 kUpper = 0xaaaaaaaa;
  const __m512i zeros = _mm512_slli_epi32(_mm512_loadu_si512(zero), 16);
  const __m512i both = _mm512_mask_blend_epi16(kUpper, _mm512_loadu_si512(colsum), zeros);
  return _mm512_sub_epi16(_mm512_setzero_si512(), both);
}

// Of 16 columns -colsum mul.
QFX_INLINE __m512i negated_products(const int32_t* colsum, int32_t mul) {
  return _mm512_mullo_epi32(_mm512_loadu_si512(colsum), _mm512_set1_epi32(-mul));
}

// 16 of a row's sums and those of a group, which have their offsets already.
QFX_INLINE __m512 scaled_and_added(__m512i exact, __m512 scale, __m512 row_scale, __m512 sums) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_mul_ps(row_scale, scale), sums);
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
