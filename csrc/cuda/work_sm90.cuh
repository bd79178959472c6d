// What a launch of a Hopper kernel computes, and in which order: tiles of the output times parts of K.
#pragma once

#include "cuda/config_sm90.h"
#include "cuda/gemm_plan.h"

namespace qfx::cuda::sm90 {

inline constexpr int kTileGroup = 8;  // tiles of the left operand that share a right one in L2

struct Problem {
  Sizes size;
  int lefts, rights;  // tiles of a matrix
  int steps;          // of kTileBytes of K
  int splits;         // parts of K, at most `steps`
  int items;          // tiles of all matrices times parts
  int32_t* sums;      // if splits > 1: [batch][M][N], zeros
  int32_t* arrivals;  // if splits > 1: one for each warp of each tile, zeros
};

// A tile and its steps of K.
struct Work {
  int left, right, matrix, tile, first, steps;
};

// All tiles of the first part of K, then those of the next. Of a matrix, kTileGroup left tiles run
// through all right ones.
__device__ __forceinline__ Work work_of(const Problem& p, int item) {
  const int of_matrix = p.lefts * p.rights, tiles = p.items / p.splits, split = item / tiles;
  Work w;
  w.tile = item % tiles;
  w.matrix = w.tile / of_matrix;
  const int r = w.tile % of_matrix, begin = r / (kTileGroup * p.rights) * kTileGroup;
  const int left = p.lefts - begin, size = left < kTileGroup ? left : kTileGroup;
  const int within = r % (kTileGroup * p.rights);
  w.left = begin + within % size;
  w.right = within / size;
  const int64_t steps = p.steps;
  w.first = static_cast<int>(steps * split / p.splits);
  w.steps = static_cast<int>(steps * (split + 1) / p.splits) - w.first;
  return w;
}

}  // namespace qfx::cuda::sm90
