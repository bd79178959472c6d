// What the rows of attention's masks become before they meet scores. (A1)
#pragma once

#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr float kInfinity = __builtin_inff();

inline float larger(float a, float b) { return a > b ? a : b; }  // b where a is NaN

// What a row of a mask adds, minus infinity for keys that the row does not see.             (A1)
inline void mask_of_floats(const float* __restrict b, int64_t keys, float* __restrict out) {
  constexpr float kHidden = -1e4f, kBehind = -1e3f;
  float high[kPanel], low[kPanel];
  for (int n = 0; n < kPanel; ++n) high[n] = -kInfinity, low[n] = kInfinity;
  int64_t i = 0;
  for (; i + kPanel <= keys; i += kPanel) {
    for (int n = 0; n < kPanel; ++n) {
      const float v = b[i + n];
      high[n] = larger(v, high[n]);
      low[n] = v < low[n] ? v : low[n];
      out[i + n] = v;
    }
  }
  for (int n = 0; i < keys; ++i, ++n) {
    high[n] = larger(b[i], high[n]);
    low[n] = b[i] < low[n] ? b[i] : low[n];
    out[i] = b[i];
  }
  float top = -kInfinity;
  for (int n = 0; n < kPanel; ++n) top = larger(high[n], top);
  bool any = false;
  for (int n = 0; n < kPanel; ++n) any |= low[n] <= kHidden;
  if (!any) return;
  for (int64_t n = 0; n < keys; ++n) {
    const float behind = out[n] - top;
    const bool hidden = (out[n] <= kHidden) & (behind <= kBehind);
    out[n] = hidden ? -kInfinity : out[n];
  }
}

inline void mask_of_bools(const uint8_t* __restrict b, int64_t keys, float* __restrict out) {
  for (int64_t n = 0; n < keys; ++n) out[n] = b[n] != 0 ? 0.f : -kInfinity;
}

// Scores of 32 keys and what the mask adds to them.
inline void add_mask(float* __restrict t, const float* __restrict mask) {
  for (int n = 0; n < kPanel; ++n) t[n] = mask[n] == -kInfinity ? -kInfinity : t[n] + mask[n];
}

inline void hide_from(int keys, float* t) {
  for (int n = 0; n < kPanel; ++n) t[n] = n < keys ? t[n] : -kInfinity;
}

}  // namespace
}  // namespace qfx::cpu
