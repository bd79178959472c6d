// The gates of a recurrent cell, on a row of floats. (L1) (L2)
#pragma once

#include "cpu/kernels/rows/activation.h"
#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// The tanh of v is 2 sigmoid(2 v) - 1, which is in [-1, 1] however it rounds.
inline float sigmoid_of(float v) { return gated(1.f, v); }
inline float tanh_of(float v) { return 2.f * gated(1.f, 2.f * v) - 1.f; }

// Calls f(first column, columns) for the panels of a row.
template <typename F>
inline void for_each_part(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kPanel <= size; i += kPanel) f(i, kPanel);
  if (i < size) f(i, static_cast<int>(size - i));
}

inline char* element_at(const CellRow& row, int64_t i) {
  return static_cast<char*>(row.h) + i * (row.dtype == Dtype::kFloat32 ? 4 : 2);
}

inline void lstm_row(const CellRow* row) {
  for_each_part(row->size, [&](int64_t begin, int columns) {
    alignas(64) float c[kPanel], h[kPanel] = {};
    const float *x = row->x + begin, *r = row->r + begin, *before = row->c + begin;
    const int64_t f = row->size, g = 2 * f, o = 3 * f;
    for (int j = 0; j < columns; ++j) {
      const float kept = sigmoid_of(x[f + j] + r[f + j]) * before[j];
      c[j] = kept + sigmoid_of(x[j] + r[j]) * tanh_of(x[g + j] + r[g + j]);
      h[j] = sigmoid_of(x[o + j] + r[o + j]) * tanh_of(c[j]);
    }
    store_columns(c, columns, row->c + begin);
    store_row(h, columns, row->dtype, element_at(*row, begin));
  });
}

inline void gru_row(const CellRow* row) {
  for_each_part(row->size, [&](int64_t begin, int columns) {
    alignas(64) float h[kPanel] = {};
    const float *x = row->x + begin, *r = row->r + begin, *before = row->before + begin;
    const int64_t z = row->size, n = 2 * z;
    for (int j = 0; j < columns; ++j) {
      const float reset = sigmoid_of(x[j] + r[j]);
      const float next = tanh_of(x[n + j] + reset * r[n + j]);
      h[j] = next + sigmoid_of(x[z + j] + r[z + j]) * (before[j] - next);
    }
    store_row(h, columns, row->dtype, element_at(*row, begin));
  });
}

}  // namespace
}  // namespace qfx::cpu
