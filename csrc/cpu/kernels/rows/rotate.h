// The transform of a row before it is quantized: R (x * factor), R of blocks of 16 or 64. (R1)
// R is log2(block) stages: stage h adds to v[i] its partner v[i ^ h] or takes it off, then all are
// divided by the root of the block. Each is one float operation, so all instruction sets agree.
#pragma once

#include "cpu/kernels/rows/range.h"
#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/kernels/rows/rotate_wide.h"
#else
#include "cpu/kernels/rows/rotate_plain.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline Range scale_row(const float* x, int64_t n, const float* factor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = factor == nullptr ? x[i] : x[i] * factor[i];
  return range_between(extremes_of_row(out, n));
}

template <bool kBack>
inline Range rotate_any(const float* x, int64_t n, const Transform& t, float* out) {
  switch (t.rotation) {
    case 16:
      return rotate_blocks<16, kBack>(x, n, t.factor, out);
    case 64:
      return rotate_blocks<64, kBack>(x, n, t.factor, out);
    default:
      return scale_row(x, n, t.factor, out);
  }
}

inline void rotate_row(const float* x, int64_t n, const Transform* t, float* out, Range* range) {
  *range = rotate_any<false>(x, n, *t, out);
}

inline void rotate_row_back(const float* x, int64_t n, const Transform* t, float* out) {
  rotate_any<true>(x, n, *t, out);
}

}  // namespace
}  // namespace qfx::cpu
