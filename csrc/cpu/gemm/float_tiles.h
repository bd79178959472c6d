// How rows of floats are cut into tiles, and weights that become floats into blocks. (W1)
#pragma once

#include <cstdint>

#include "cpu/gemm/pack.h"
#include "cpu/gemm/tuning.h"
#include "cpu/kernels/tables/weight_only.h"

namespace qfx::cpu {

// Of K at a time: as many bytes of floats as a block of codes has, which stay in the first cache.
inline int64_t floats_depth(const Tuning& tuning) {
  constexpr int64_t kBytes = sizeof(float);
  return round_up(tuning.block_depth / kBytes, kGroup);
}

// f(m, rows) of tiles, whose heights differ by one at most.
template <typename F>
void for_each_float_tile(int64_t count, const F& f) {
  const int64_t tiles = (count + kMaxFloatRows - 1) / kMaxFloatRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = t * count / tiles;
    f(begin, (t + 1) * count / tiles - begin);
  }
}

}  // namespace qfx::cpu
