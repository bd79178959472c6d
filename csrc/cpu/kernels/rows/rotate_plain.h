// R as plain loops, the definition of the vectorized one, and what runs of small blocks. (R1)
#pragma once

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/rows/rotate_stages.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own
namespace plain {

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
  // GCC 12 fuses products with the sums and differences after them although contraction is off, so
  // the products are written to memory first.
  asm("" : "+m"(v));
  for (int h = 1, back = kBlock / 2; h < kBlock; h *= 2, back /= 2) {
    stage<kBlock, kBack>(kBack ? back : h, v);
  }
  for (int i = 0; i < kBlock; ++i) {
    const float rotated = v[i] * kInverseRoot<kBlock>;
    out[i] = kBack && factor != nullptr ? rotated * factor[i] : rotated;
  }
}

template <int kBlock, bool kBack>
inline Range rotate_blocks(const float* x, int64_t n, const float* factor, float* out) {
  for (int64_t i = 0; i < n; i += kBlock) {
    rotate_block<kBlock, kBack>(x + i, factor == nullptr ? nullptr : factor + i, out + i);
  }
  return range_between(extremes_of_row(out, n));
}

}  // namespace plain
}  // namespace
}  // namespace qfx::cpu
