// The transform of a row before it is quantized: R (x * factor). (R1)
// R of a block is log2(block) stages: stage h adds to v[i] its partner v[i ^ h] or takes it off,
// then all are divided by the root of the block. Each is one float operation, so all instruction
// sets agree. What is left behind the largest blocks has one block for each bit of its length.
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

// Blocks of this size, which divides n.
template <bool kBack>
inline Range rotate_in(int block, const float* x, int64_t n, const float* factor, float* out) {
  switch (block) {
    case 2:
      return rotate_blocks<2, kBack>(x, n, factor, out);
    case 4:
      return rotate_blocks<4, kBack>(x, n, factor, out);
    case 8:
      return rotate_blocks<8, kBack>(x, n, factor, out);
    case 16:
      return rotate_blocks<16, kBack>(x, n, factor, out);
    case 32:
      return rotate_blocks<32, kBack>(x, n, factor, out);
    case 64:
      return rotate_blocks<64, kBack>(x, n, factor, out);
    case 128:
      return rotate_blocks<128, kBack>(x, n, factor, out);
    case 256:
      return rotate_blocks<256, kBack>(x, n, factor, out);
    default:
      return scale_row(x, n, factor, out);
  }
}

// The n mod rotation elements from `begin` on.
template <bool kBack>
inline Range rotate_rest(const float* x, int64_t begin, int64_t n, const Transform& t, float* out) {
  Range range = {0, 0, 0};
  for (int block = t.rotation / 2; block > 0; block /= 2) {
    if ((n & block) == 0) continue;
    const float* factor = t.factor == nullptr ? nullptr : t.factor + begin;
    range = united(range, rotate_in<kBack>(block, x + begin, block, factor, out + begin));
    begin += block;
  }
  return range;
}

template <bool kBack>
inline Range rotate_any(const float* x, int64_t n, const Transform& t, float* out) {
  const int64_t whole = t.rotation == 0 ? n : n & -int64_t{t.rotation};
  const Range range = rotate_in<kBack>(t.rotation, x, whole, t.factor, out);
  return whole == n ? range : united(range, rotate_rest<kBack>(x, whole, n, t, out));
}

inline void rotate_row(const float* x, int64_t n, const Transform* t, float* out, Range* range) {
  *range = rotate_any<false>(x, n, *t, out);
}

inline void rotate_row_back(const float* x, int64_t n, const Transform* t, float* out) {
  rotate_any<true>(x, n, *t, out);
}

}  // namespace
}  // namespace qfx::cpu
