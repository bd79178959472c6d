// Products of arranged rows with one panel of 32 columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// The tiles of `count` arranged rows with one panel: out[count][32].
inline void multiply_rows(const Rows& rows, int64_t count, const int8_t* panel, int64_t depth,
                          int32_t* out) {
  const Format& format = *rows.format;
  for (int64_t m = 0; m < count; m += format.tile_rows) {
    const int64_t height = std::min<int64_t>(format.tile_rows, count - m);
    format.tiles[height - 1](rows.a + m * rows.stride, rows.stride, panel, depth / kGroup, panel,
                             out + m * kPanel, false);
  }
}

// Room for `count` rows of operands with k elements.
inline Rows rows_with(const Format& format, int64_t count, int64_t k, RowsMemory& memory) {
  PackedWeight w = {};
  w.k = k;
  return make_rows(format, count, w, memory);
}

}  // namespace qfx::cpu
