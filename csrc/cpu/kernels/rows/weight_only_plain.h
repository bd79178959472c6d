// Rows of floats times int8 weights in plain loops. (W1)
#pragma once

#include "cpu/kernels/tables/weight_only.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

template <int kRows, int>
void weight_only(const float* x, int64_t ldx, const int8_t* b, int64_t groups, int64_t,
                 float* sums) {
  float s[kRows][2][kPanel] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroup, b += kPanel * kGroup) {
    for (int j = 0; j < kGroup; ++j) {
      for (int r = 0; r < kRows; ++r) {
        float* to = s[r][j / 2];
        for (int n = 0; n < kPanel; ++n) {
          to[n] = __builtin_fmaf(x[r * ldx + j], static_cast<float>(b[n * kGroup + j]), to[n]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int n = 0; n < kPanel; ++n) sums[r * kPanel + n] = s[r][0][n] + s[r][1][n];
  }
}

inline void floats_of_codes(const int8_t* b, int64_t groups, float* w) {
  for (int64_t k = 0; k < groups * kGroup; ++k) {
    const int8_t* from = b + k / kGroup * kGroup * kPanel + k % kGroup;
    for (int n = 0; n < kPanel; ++n) w[k * kPanel + n] = from[n * kGroup];
  }
}

// A few columns at a time, whose chains fit into registers.
template <int kRows>
void weight_only_chains(const FloatTile& t, float* s) {
  constexpr int kColumns = 8;
  for (int n = 0; n < kPanel; n += kColumns) {
    for (int64_t k = 0; k < t.groups * kGroup; ++k) {
      const float* w = t.w + k * kPanel + n;
      float* to = s + k % kGroup / 2 * kPanel + n;
      for (int r = 0; r < kRows; ++r) {
        const float x = t.x[r * t.ldx + k];
        for (int i = 0; i < kColumns; ++i) {
          to[2 * r * kPanel + i] = __builtin_fmaf(x, w[i], to[2 * r * kPanel + i]);
        }
      }
    }
  }
}

template <int kRows>
void weight_only_scaled(const FloatTile& t, const float* scale, float* sums) {
  float s[kRows][2][kPanel] = {};
  weight_only_chains<kRows>(t, s[0][0]);
  for (int r = 0; r < kRows; ++r, sums += kPanel) {
    for (int n = 0; n < kPanel; ++n) {
      sums[n] = __builtin_fmaf(s[r][0][n] + s[r][1][n], scale[n], sums[n]);
    }
  }
}

}  // namespace
}  // namespace qfx::cpu
