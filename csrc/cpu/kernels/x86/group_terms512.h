// What becomes of 32 raw sums of a group, with 512-bit registers. (E3)
#pragma once

#include <immintrin.h>

#include "cpu/kernels/tables/groups.h"

namespace qfx::cpu {
namespace {

#define QFX_INLINE inline __attribute__((always_inline))

inline constexpr int32_t kNoZeros[kPanel] = {};

// The columns of one group after the other.
struct GroupColumns {
  const int32_t *colsum, *zero;
  const float* scale;
  int64_t zero_step, scale_step;

  explicit QFX_INLINE GroupColumns(const GroupTerms& t)
      : colsum(t.colsum),
        zero(t.zero == nullptr ? kNoZeros : t.zero),
        scale(t.scale),
        zero_step(t.zero == nullptr ? 0 : t.zero_step),
        scale_step(t.scale_step) {}

  QFX_INLINE void next() {
    colsum += kPanel;
    zero += zero_step;
    scale += scale_step;
  }

  // Of the left or right 16 columns -colsum and, 16 bits higher, -zero.
  QFX_INLINE __m512i pairs(int half) const {
    const __m512i sums = _mm512_loadu_si512(colsum + 16 * half);
    const __m512i zeros = _mm512_slli_epi32(_mm512_loadu_si512(zero + 16 * half), 16);
    constexpr __mmask32 kUpper = 0xaaaaaaaa;
    const __m512i both = _mm512_mask_blend_epi16(kUpper, sums, zeros);
    return _mm512_sub_epi16(_mm512_setzero_si512(), both);
  }

  QFX_INLINE __m512i times(int32_t mul, int half) const {
    return _mm512_mullo_epi32(_mm512_loadu_si512(colsum + 16 * half), _mm512_set1_epi32(-mul));
  }

  QFX_INLINE __m512 scales(int half) const { return _mm512_loadu_ps(scale + 16 * half); }
};

// Adds 16 of a row's sums, which have their offsets already.
QFX_INLINE void add_scaled(__m512i exact, __m512 scale, __m512 row_scale, float* sums) {
  const __m512 both = _mm512_mul_ps(row_scale, scale);
  const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), both, _mm512_loadu_ps(sums));
  _mm512_storeu_ps(sums, sum);
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
