// A panel of sums becomes columns of outputs: scale, bias, residual, activation, one rounding.
#pragma once

#include "cpu/kernels/rows/activation.h"
#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/rows/widen.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

template <Activation A>
inline void activate_all(float* y) {
  for (int n = 0; n < kPanel; ++n) y[n] = activate<A>(y[n]);
}

// Adds the columns of row m of a residual, unless it is null, to y.
template <typename Args>
inline void add_residual(const Args& e, int m, float* y) {
  if (e.residual == nullptr) return;
  const int64_t element = e.dtype == Dtype::kFloat32 ? 4 : 2;
  const char* row = e.residual + m * e.ldo * element;
  float more[kPanel];
  if (e.dtype == Dtype::kFloat32) {
    __builtin_memcpy(more, row, sizeof(float) * e.columns);
  } else {
    widen_row(row, e.dtype, e.columns, more);
  }
  for (int n = 0; n < e.columns; ++n) y[n] = y[n] + more[n];
}

// y[n] = float(raw + add - mul * colsum) * (scale * wscale) + bias                            (E1)
inline void scale_row(const int32_t* raw, uint32_t add, uint32_t mul, float scale, const Panel& p,
                      float* y) {
  for (int n = 0; n < kPanel; ++n) {
    const uint32_t acc =
        static_cast<uint32_t>(raw[n]) + add - mul * static_cast<uint32_t>(p.colsum[n]);
    y[n] = static_cast<float>(static_cast<int32_t>(acc)) * (scale * p.scale[n]);
  }
  if (p.has_bias) {
    for (int n = 0; n < kPanel; ++n) y[n] = y[n] + p.bias[n];
  }
}

template <Activation A>
inline void finish_tile(const EpilogueArgs& e) {
  const int64_t element = e.dtype == Dtype::kFloat32 ? 4 : 2;
  alignas(64) float y[kPanel];
  for (int m = 0; m < e.rows; ++m) {
    const uint32_t add = static_cast<uint32_t>(e.row_add[m]),
                   mul = static_cast<uint32_t>(e.row_mul[m]);
    scale_row(e.tile + m * kPanel, add, mul, e.row_scale[m * e.scale_stride], *e.panel, y);
    add_residual(e, m, y);
    activate_all<A>(y);
    store_row(y, e.columns, e.dtype, static_cast<char*>(e.out) + m * e.ldo * element);
  }
}

// One of the two scales is 1, which changes nothing.                                    (W1) (E3)
template <Activation A>
inline void finish_rows_of_floats(const FloatEpilogueArgs& e) {
  const int64_t element = e.dtype == Dtype::kFloat32 ? 4 : 2;
  alignas(64) float y[kPanel];
  for (int m = 0; m < e.rows; ++m) {
    const float scale = e.row_scale[m * e.scale_stride], *sums = e.sums + m * kPanel;
    for (int n = 0; n < kPanel; ++n) y[n] = sums[n] * (scale * e.panel->scale[n]);
    if (e.panel->has_bias) {
      for (int n = 0; n < kPanel; ++n) y[n] = y[n] + e.panel->bias[n];
    }
    add_residual(e, m, y);
    activate_all<A>(y);
    store_row(y, e.columns, e.dtype, static_cast<char*>(e.out) + m * e.ldo * element);
  }
}

inline void epilogue(const EpilogueArgs* args) {
  with_activation(args->activation, [&](auto a) { finish_tile<decltype(a)::value>(*args); });
}

inline void finish_floats(const FloatEpilogueArgs* args) {
  with_activation(args->activation,
                  [&](auto a) { finish_rows_of_floats<decltype(a)::value>(*args); });
}

}  // namespace
}  // namespace qfx::cpu
