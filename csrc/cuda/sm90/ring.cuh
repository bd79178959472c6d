// The ring of stages in shared memory through which tiles come: who waits for whom, what is loaded
// for which item of work, and what the blocks of a cluster load for each other. docs/cuda.md says
// how.
#pragma once

#include "cuda/sm90/launch.h"
#include "cuda/sm90/ptx.cuh"

namespace qfx::cuda::sm90 {

// A configuration as constants of a type.
template <Config kC>
struct Constants {
  static constexpr Operands kOperands = kC.operands;
  static constexpr int kLeft = kC.left, kRight = kC.right, kStages = kC.stages;
  static constexpr int kWarpgroups = kC.warpgroups, kGroups = kC.groups;
  static constexpr bool kSwap = kC.swap;
  static constexpr int kCluster = kC.cluster;
  static_assert(kTileGroup % kC.cluster == 0, "the blocks of a cluster have one right tile");
  static constexpr int kBlocks = kC.blocks(), kConsumers = kC.consumers();
  static constexpr int kThreads = kC.threads(), kStageBytes = kC.stage_bytes();
  static constexpr int kPieceRows = kC.piece_rows(), kPieceColumns = kC.piece_columns();
  static constexpr int kPiecePitch = kC.piece_pitch(), kPieces = kC.pieces();
  static constexpr int kPieceBytes = kC.piece_bytes(), kShared = kC.shared_bytes();
};

// The ring of stages and its barriers, in shared memory.
template <class C>
struct Ring {
  uint8_t* stages;
  Barrier *full, *empty;  // [kStages]
  Barrier* turn;          // [kGroups]

  __device__ __forceinline__ uint8_t* left(int stage) const {
    return stages + stage * C::kStageBytes;
  }
  __device__ __forceinline__ uint8_t* right(int stage) const {
    return left(stage) + C::kLeft * kTileBytes;
  }
};

// A tile and its steps of K.
struct Work {
  int left, right, matrix, tile, first, steps;
};

// All tiles of the first part of K, then those of the next. Of a matrix, kTileGroup left tiles run
// through all right ones. The number of left tiles is a multiple of a cluster's blocks, so that
// items that follow each other in a cluster differ in the left tile alone.
__device__ __forceinline__ Work work_of(const Problem& p, int item) {
  const int of_matrix = p.lefts * p.rights, tiles = p.items / p.splits, split = item / tiles;
  Work w;
  w.tile = item % tiles;
  w.matrix = w.tile / of_matrix;
  const int r = w.tile % of_matrix, begin = r / (kTileGroup * p.rights) * kTileGroup;
  const int size = min(kTileGroup, p.lefts - begin), within = r % (kTileGroup * p.rights);
  w.left = begin + within % size;
  w.right = within / size;
  const int64_t steps = p.steps;
  w.first = static_cast<int>(steps * split / p.splits);
  w.steps = static_cast<int>(steps * (split + 1) / p.splits) - w.first;
  return w;
}

// Where a warpgroup is in the ring; `parity` changes with every turn.
template <class C>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage < C::kStages) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ __forceinline__ void skip(int steps) {
    stage += steps;
    parity ^= stage / C::kStages & 1;
    stage %= C::kStages;
  }
};

template <class C>
__device__ __forceinline__ void init_barriers(const Ring<C>& ring) {
  for (int s = 0; s < C::kStages; ++s) {
    init_barrier(ring.full + s, 1);
    init_barrier(ring.empty + s, 4 * C::kWarpgroups * C::kCluster);  // warps that read it
  }
  for (int g = 0; g < C::kGroups; ++g) init_barrier(ring.turn + g, 4 * C::kWarpgroups);
  show_barriers();
}

// The blocks of a cluster have the same right tile. Each loads a part of its rows, for all of them.
template <class C>
__device__ __forceinline__ void load_right(uint8_t* to, const CUtensorMap* map, Barrier* full,
                                           int k, int row, int matrix) {
  if constexpr (C::kCluster == 1) {
    load_tile(to, map, full, k, row, matrix);
  } else {
    constexpr int kRows = C::kRight / C::kCluster;
    constexpr unsigned kAllBlocks = (1u << C::kCluster) - 1;
    const int first = block_in_cluster() * kRows;
    load_tile_to(kAllBlocks, to + first * kTileBytes, map, full, k, row + first, matrix);
  }
}

// Loads all that the warpgroups of this block will multiply, in their order.
template <class C>
__device__ __forceinline__ void produce(const Ring<C>& ring, const CUtensorMap* left,
                                        const CUtensorMap* right, const Problem& p) {
  Cursor<C> at;
  for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
    const Work w = work_of(p, item);
    for (int step = w.first; step < w.first + w.steps; ++step, at.next()) {
      Barrier* full = ring.full + at.stage;
      wait_phase(ring.empty + at.stage, at.parity ^ 1);
      arrive_expecting(full, C::kStageBytes);
      const int k = step * kTileBytes;
      load_tile(ring.left(at.stage), left, full, k, w.left * C::kLeft, w.matrix);
      load_right<C>(ring.right(at.stage), right, full, k, w.right * C::kRight, w.matrix);
    }
  }
}

// Signals every block that loads into a stage that this warp has read it.
template <class C>
__device__ __forceinline__ void release(Barrier* empty) {
  const int lane = threadIdx.x % 32;
  if constexpr (C::kCluster == 1) {
    if (lane == 0) arrive(empty);
  } else {
    if (lane < C::kCluster) arrive_at(empty, lane);
  }
}

}  // namespace qfx::cuda::sm90
