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

// A row that t.rotation divides.
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

inline bool has_rest(int64_t n, const Transform& t) {
  return t.rotation != 0 && (n & (t.rotation - 1)) != 0;
}

// rotate(begin, count, transform) for the blocks of t.rotation that fit, and for each of the rest.
template <typename Rotate>
[[gnu::noinline]] void in_parts(int64_t n, const Transform& t, const Rotate& rotate) {
  int64_t begin = 0;
  for (int block = t.rotation; block > 0; block /= 2) {
    const int64_t end = n & -int64_t{block};
    if (begin == end) continue;
    const Transform part = {t.factor == nullptr ? nullptr : t.factor + begin, block};
    rotate(begin, end - begin, part);
    begin = end;
  }
}

inline void rotate_row(const float* x, int64_t n, const Transform* t, float* out, Range* range) {
  if (!has_rest(n, *t)) {
    *range = rotate_any<false>(x, n, *t, out);
    return;
  }
  *range = {0, 0, 0};
  in_parts(n, *t, [&](int64_t begin, int64_t count, const Transform& part) {
    Range found;
    rotate_row(x + begin, count, &part, out + begin, &found);
    *range = united(*range, found);
  });
}

inline void rotate_row_back(const float* x, int64_t n, const Transform* t, float* out) {
  if (!has_rest(n, *t)) {
    rotate_any<true>(x, n, *t, out);
    return;
  }
  in_parts(n, *t, [&](int64_t begin, int64_t count, const Transform& part) {
    rotate_row_back(x + begin, count, &part, out + begin);
  });
}

}  // namespace
}  // namespace qfx::cpu
