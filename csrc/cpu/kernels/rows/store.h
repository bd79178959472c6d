// Rounding a row of floats of a panel to the output type and storing its columns.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "half.h"
#include "types.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

// A whole panel's row is stored by a few instructions, the last one's by a call.
template <typename T>
inline void store_columns(const T* y, int columns, void* out) {
  if (columns == kPanel) {
    __builtin_memcpy(out, y, sizeof(T) * kPanel);
  } else {
    __builtin_memcpy(out, y, sizeof(T) * columns);
  }
}

inline void store_row(const float* y, int columns, Dtype dtype, void* out) {
  if (dtype == Dtype::kFloat32) return store_columns(y, columns, out);
  uint16_t half[kPanel];
  if (dtype == Dtype::kBFloat16) {
    for (int n = 0; n < kPanel; ++n) half[n] = to_bfloat16(y[n]);
  } else {
#if defined(__F16C__)
    for (int n = 0; n < kPanel; n += 8) {
      const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(y + n), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(half + n), h);
    }
#else
    for (int n = 0; n < kPanel; ++n) {
      half[n] = __builtin_bit_cast(uint16_t, static_cast<Half>(y[n]));
    }
#endif
  }
  store_columns(half, columns, out);
}

}  // namespace
}  // namespace qfx::cpu
