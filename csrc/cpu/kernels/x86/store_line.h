// 32 floats of a line of outputs, as any type, to memory and from it.
#pragma once

#include "cpu/kernels/x86/floats16.h"

namespace qfx::cpu {
namespace {

#define QFX_INLINE inline __attribute__((always_inline))

// 32 floats, rounded to nearest and even. One instruction does that, but takes denormal numbers for
// zeros.
QFX_INLINE __m512i bfloat16_of(Floats16 left, Floats16 right) {
#if defined(__AVX512BF16__)
  constexpr int kDenormal = 0x20;
  if (!(_mm512_fpclass_ps_mask(left.v, kDenormal) | _mm512_fpclass_ps_mask(right.v, kDenormal)))
      [[likely]] {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right.v, left.v));
  }
#endif
  const auto narrow = [](__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(left.v)), narrow(right.v), 1);
}

QFX_INLINE __m512i float16_of(Floats16 left, Floats16 right) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(left.v, kNearest)),
                            _mm512_cvtps_ph(right.v, kNearest), 1);
}

// The columns that there are; whole lines of 64 bytes may bypass the caches.
template <Dtype D>
QFX_INLINE void store_line(const Floats16 (&y)[2], __mmask32 columns, bool past_caches, char* out) {
  if constexpr (D == Dtype::kFloat32) {
    float* to = reinterpret_cast<float*>(out);
    if (past_caches) {
      _mm512_stream_ps(to, y[0].v);
      _mm512_stream_ps(to + 16, y[1].v);
    } else {
      _mm512_mask_storeu_ps(to, static_cast<__mmask16>(columns), y[0].v);
      _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(columns >> 16), y[1].v);
    }
  } else {
    const __m512i halves = D == Dtype::kBFloat16 ? bfloat16_of(y[0], y[1]) : float16_of(y[0], y[1]);
    if (past_caches) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), halves);
    } else {
      _mm512_mask_storeu_epi16(out, columns, halves);
    }
  }
}

// Adds the columns that there are of such a line.
template <Dtype D>
QFX_INLINE void add_line(const char* line, __mmask32 columns, Floats16 (&y)[2]) {
  if constexpr (D == Dtype::kFloat32) {
    const float* from = reinterpret_cast<const float*>(line);
    y[0] = y[0] + Floats16(_mm512_maskz_loadu_ps(static_cast<__mmask16>(columns), from));
    y[1] = y[1] + Floats16(_mm512_maskz_loadu_ps(static_cast<__mmask16>(columns >> 16), from + 16));
  } else {
    const __m512i halves = _mm512_maskz_loadu_epi16(columns, line);
    const auto wide = [](__m256i v) {
      if constexpr (D == Dtype::kFloat16) return Floats16(_mm512_cvtph_ps(v));
      return Floats16(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)));
    };
    y[0] = y[0] + wide(_mm512_castsi512_si256(halves));
    y[1] = y[1] + wide(_mm512_extracti64x4_epi64(halves, 1));
  }
}

#undef QFX_INLINE

// f<activation, dtype>() of an output's.
template <typename F>
inline void with_output(Activation activation, Dtype dtype, const F& f) {
  with_activation(activation, [&](auto a) {
    constexpr Activation kActivation = decltype(a)::value;
    if (dtype == Dtype::kFloat32) return f.template operator()<kActivation, Dtype::kFloat32>();
    if (dtype == Dtype::kBFloat16) return f.template operator()<kActivation, Dtype::kBFloat16>();
    f.template operator()<kActivation, Dtype::kFloat16>();
  });
}

}  // namespace
}  // namespace qfx::cpu
