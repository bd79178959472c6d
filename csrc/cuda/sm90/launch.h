// What a launch of a Hopper kernel computes, and in which order.
#pragma once

#include <cuda.h>

#include "cuda/gemm/gemm.h"
#include "cuda/sm90/config.h"

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

// A launch, but for what makes its sums exact.
struct Launch {
  CUtensorMap left, right;
  Problem problem;
  Output out;
  int blocks;
  Stream stream;
};

// launch_s8_128x256(launch, terms) and so on.
#define QFX_S8(name, ...) void launch_##name(const Launch& l, const CodeTerms& terms);
#define QFX_B1(name, ...) void launch_##name(const Launch& l, const SignTerms& terms);
#include "cuda/sm90/kernels.inc"
#undef QFX_S8
#undef QFX_B1

}  // namespace qfx::cuda::sm90
