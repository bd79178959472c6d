// Half types -> float32, which is exact.
#pragma once

#include "cpu/kernels/rows/store.h"
#include "types.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline void widen_row(const void* x, Dtype dtype, int64_t n, float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(x);
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(half[i]) << 16);
    return;
  }
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(h));
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<float>(__builtin_bit_cast(Half, half[i]));
}

}  // namespace
}  // namespace qfx::cpu
