// The transform of a row before it is quantized: R (x * factor). (R1)
// R is log2(block) stages: stage h adds to v[i] its partner v[i ^ h] or takes it off, then all are
// divided by the root of the block. Each is one float operation, so all instruction sets agree.
#pragma once

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/rows/rotate_plain.h"
#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/kernels/rows/rotate_wide.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline Range scale_row(const float* x, int64_t n, const float* factor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = factor == nullptr ? x[i] : x[i] * factor[i];
  return range_between(extremes_of_row(out, n));
}

template <int kBlock, bool kBack>
inline Range rotate_blocks(const float* x, int64_t n, const float* factor, float* out) {
#if defined(__AVX2__) && defined(__FMA__)
  if constexpr (kBlock >= 16) return wide::rotate_blocks<kBlock, kBack>(x, n, factor, out);
#endif
  return plain::rotate_blocks<kBlock, kBack>(x, n, factor, out);
}

template <bool kBack>
inline Range rotate_any(const float* x, int64_t n, const Transform& t, float* out) {
  switch (t.rotation) {
    case 2:
      return rotate_blocks<2, kBack>(x, n, t.factor, out);
    case 4:
      return rotate_blocks<4, kBack>(x, n, t.factor, out);
    case 8:
      return rotate_blocks<8, kBack>(x, n, t.factor, out);
    case 16:
      return rotate_blocks<16, kBack>(x, n, t.factor, out);
    case 32:
      return rotate_blocks<32, kBack>(x, n, t.factor, out);
    case 64:
      return rotate_blocks<64, kBack>(x, n, t.factor, out);
    case 128:
      return rotate_blocks<128, kBack>(x, n, t.factor, out);
    case 256:
      return rotate_blocks<256, kBack>(x, n, t.factor, out);
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
