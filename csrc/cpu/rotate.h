// The transform of a row before it is quantized: R (x * factor), R of blocks of 16 or 64. (R1)
// R is log2(block) stages: stage h adds to v[i] its partner v[i ^ h] or takes it off, then all are
// divided by the root of the block. Each is one float operation, so all instruction sets agree.
#pragma once

#include "cpu/range.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// Whether stage h takes the partner off: h is bit 0 or bit 1 of a digit of i in base 4, on whose
// two bits the sign depends. Stages back are those of the transpose.
template <bool kBack>
constexpr bool takes_off(int i, int h) {
  constexpr int kLowBits = 0x15;
  const int at = kBack ? i ^ h : i;
  return (h & kLowBits) != 0 ? ((at & h) != 0) != ((at & 2 * h) != 0) : (at & h) != 0;
}

template <int kBlock>
constexpr float kInverseRoot = kBlock == 16 ? 1 / 4.f : 1 / 8.f;

template <int kBlock, bool kBack>
inline void stage(int h, float* v) {
  float partner[kBlock];
  for (int i = 0; i < kBlock; ++i) partner[i] = v[i ^ h];
  for (int i = 0; i < kBlock; ++i) {
    v[i] = takes_off<kBack>(i, h) ? v[i] - partner[i] : v[i] + partner[i];
  }
}

template <int kBlock, bool kBack>
inline void rotate_block(const float* x, const float* factor, float* out) {
  float v[kBlock];
  for (int i = 0; i < kBlock; ++i) v[i] = !kBack && factor != nullptr ? x[i] * factor[i] : x[i];
  if constexpr (kBack) {
    for (int h = kBlock / 2; h >= 1; h /= 2) stage<kBlock, kBack>(h, v);
  } else {
    for (int h = 1; h < kBlock; h *= 2) stage<kBlock, kBack>(h, v);
  }
  for (int i = 0; i < kBlock; ++i) {
    const float rotated = v[i] * kInverseRoot<kBlock>;
    out[i] = kBack && factor != nullptr ? rotated * factor[i] : rotated;
  }
}

template <int kBlock, bool kBack>
inline void rotate_blocks(const float* x, int64_t n, const float* factor, float* out) {
  for (int64_t i = 0; i < n; i += kBlock) {
    rotate_block<kBlock, kBack>(x + i, factor == nullptr ? nullptr : factor + i, out + i);
  }
}

template <bool kBack>
inline void rotate_any(const float* x, int64_t n, const Transform& t, float* out) {
  switch (t.rotation) {
    case 16:
      return rotate_blocks<16, kBack>(x, n, t.factor, out);
    case 64:
      return rotate_blocks<64, kBack>(x, n, t.factor, out);
  }
  for (int64_t i = 0; i < n; ++i) out[i] = t.factor == nullptr ? x[i] : x[i] * t.factor[i];
}

inline void rotate_row(const float* x, int64_t n, const Transform* t, float* out, Range* range) {
  rotate_any<false>(x, n, *t, out);
  range_of_row(out, n, range);
}

inline void rotate_row_back(const float* x, int64_t n, const Transform* t, float* out) {
  rotate_any<true>(x, n, *t, out);
}

}  // namespace
}  // namespace qfx::cpu
