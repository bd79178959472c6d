// The Hopper GEMM: acc[l, i, j] = sum_k left[l, i, k] right[l, j, k], exact, and its epilogue (E1).
// Persistent blocks; one warpgroup loads (TMA), the others multiply (wgmma). docs/cuda.md says
// how.
#pragma once

#include "cuda/gemm/finish.cuh"
#include "cuda/sm90/ring.cuh"

namespace qfx::cuda::sm90 {

inline constexpr int kStepsOfStage = 4;  // of 32 bytes of K, what one wgmma takes

// A K-major tile of rows of 128 bytes, swizzled, in groups of 8 rows; add n / 16 for byte n of K.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  constexpr uint64_t kStride = kTileAlign >> 4, kSwizzle128 = 1;
  return ((shared_address(tile) & 0x3ffff) >> 4) | (1ull << 16) | (kStride << 32) |
         (kSwizzle128 << 62);
}

// One warp's part of its tile; every warp signals the producer when it has read a stage.
template <class C>
__device__ __forceinline__ void multiply(const Ring<C>& ring, Cursor<C>& at, int steps,
                                         int warpgroup, int32_t (&d)[C::kBlocks][C::kRight / 2]) {
  int previous = 0;
  for (int step = 0; step < steps; ++step, at.next()) {
    wait_phase(ring.full + at.stage, at.parity);
    const uint64_t right = tile_descriptor(ring.right(at.stage));
    const uint64_t left =
        tile_descriptor(ring.left(at.stage) + warpgroup * C::kBlocks * 64 * kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsOfStage; ++i) {
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        const uint64_t rows = left + b * (64 * kTileBytes / 16);
        Wgmma<C::kOperands, C::kRight>::run(d[b], rows + i * 2, right + i * 2, step > 0 || i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the step before this one
    if (step > 0) release<C>(ring.empty + previous);
    previous = at.stage;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b) wgmma_results(d[b]);
  release<C>(ring.empty + previous);
}

// A piece of a warp's part of the output in its scratch, as finish.cuh takes a tile.
template <class C>
struct Piece {
  static constexpr int kThreads = 32, kM = C::kPieceRows, kN = C::kPieceColumns;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int at(int row, int column) {
    return row * C::kPiecePitch + (C::kSwap ? column : column ^ (row & 3) << 3);
  }
};

// Piece `piece` of the fragments d to the warp's scratch. The loop over pieces compares, since
// registers have no index.
template <class C>
__device__ __forceinline__ void put_piece(int piece, const int32_t (&d)[C::kBlocks][C::kRight / 2],
                                          int32_t* scratch) {
  constexpr int kPerBlock = C::kPieces / C::kBlocks, kEights = C::kRight / 8 / kPerBlock;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int q = 0; q < C::kPieces; ++q) {
    if (q != piece) continue;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t* pair = &d[q / kPerBlock][(q % kPerBlock * kEights + j) * 4 + h * 2];
        const int i = row + 8 * h, at = column + 8 * j;
        if constexpr (C::kSwap) {
          scratch[Piece<C>::at(at, i)] = pair[0];
          scratch[Piece<C>::at(at + 1, i)] = pair[1];
        } else {
          *reinterpret_cast<int2*>(scratch + Piece<C>::at(i, at)) = make_int2(pair[0], pair[1]);
        }
      }
    }
  }
}

// Where piece `piece` of a warp lies in the output.
template <class C>
__device__ __forceinline__ TilePlace place_of(const Work& w, int warp, int piece) {
  constexpr int kPerBlock = C::kPieces / C::kBlocks;
  const int block = warp / 4 * C::kBlocks + piece / kPerBlock;
  const int64_t i = w.left * C::kLeft + block * 64 + warp % 4 * 16;
  const int64_t j = w.right * C::kRight + piece % kPerBlock * 64;
  return {w.matrix, C::kSwap ? j : i, C::kSwap ? i : j};
}

// f(scratch, sums, count) for four columns of each row of a piece that exist.
template <class C, class F>
__device__ __forceinline__ void for_quads(const Problem& p, const TilePlace& at, int32_t* scratch,
                                          const F& f) {
  using P = Piece<C>;
  constexpr int kQuads = P::kN / 4;
  const int column = P::thread() % kQuads * 4;
  const int rows = static_cast<int>(min(int64_t{P::kM}, p.size.m - at.m));
  const int count = static_cast<int>(min(int64_t{4}, p.size.n - at.n - column));
  for (int r = P::thread() / kQuads; r < rows; r += 32 / kQuads) {
    const int64_t row = at.batch * p.size.m + at.m + r;
    f(reinterpret_cast<int4*>(scratch + P::at(r, column)), p.sums + row * p.size.n + at.n + column,
      count);
  }
}

// Adds a piece to the sums of its tile over the parts of K.
template <class C>
__device__ __forceinline__ void add_piece(const Problem& p, const TilePlace& at, int32_t* scratch) {
  for_quads<C>(p, at, scratch, [](const int4* from, int32_t* sums, int count) {
    const int4 four = *from;
    const int32_t values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) atomicAdd(sums + e, values[e]);
    }
  });
}

// The whole sums of a piece, back into the warp's scratch.
template <class C>
__device__ __forceinline__ void take_piece(const Problem& p, const TilePlace& at,
                                           int32_t* scratch) {
  for_quads<C>(p, at, scratch, [](int4* to, const int32_t* sums, int count) {
    int32_t values[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) values[e] = __ldcg(sums + e);
    }
    *to = make_int4(values[0], values[1], values[2], values[3]);
  });
}

// True in the warp that is the last of p.splits to have added its part of a tile: it sees them all.
__device__ __forceinline__ bool last_to_add(const Problem& p, int counter) {
  __threadfence();
  __syncwarp();
  int before = 0;
  if (threadIdx.x % 32 == 0) before = atomicAdd(p.arrivals + counter, 1);
  before = __shfl_sync(kAllLanes, before, 0);
  __threadfence();
  return before == p.splits - 1;
}

// From the accumulators of a warp to the output, by way of its scratch in shared memory.
template <class C, class Sums>
__device__ __forceinline__ void finish(const Problem& p, const Sums& sums, const Output& out,
                                       const Work& w, int warp,
                                       const int32_t (&d)[C::kBlocks][C::kRight / 2],
                                       int32_t* scratch) {
  if (p.splits > 1) {
#pragma unroll 1
    for (int piece = 0; piece < C::kPieces; ++piece) {
      put_piece<C>(piece, d, scratch);
      __syncwarp();
      add_piece<C>(p, place_of<C>(w, warp, piece), scratch);
      __syncwarp();
    }
    if (!last_to_add(p, w.tile * 4 * C::kWarpgroups + warp)) return;
  }
#pragma unroll 1
  for (int piece = 0; piece < C::kPieces; ++piece) {
    const TilePlace at = place_of<C>(w, warp, piece);
    if (p.splits > 1) {
      take_piece<C>(p, at, scratch);
    } else {
      put_piece<C>(piece, d, scratch);
    }
    __syncwarp();
    finish_tile<Piece<C>>(scratch, at, p.size, sums, out);
    __syncwarp();
  }
}

// The tiles of one group of warpgroups: every C::kGroups-th of the block's. A group multiplies when
// the one before it has done so: a barrier knows the parity of a phase, not how many have passed,
// so a group must not wait for a stage of its own while those of the other before it are yet to
// come.
template <class C, class Sums>
__device__ __forceinline__ void consume(const Ring<C>& ring, const Problem& p, const Sums& sums,
                                        const Output& out, int32_t* scratches) {
  const int consumer = threadIdx.x / kWarpgroup, group = consumer / C::kWarpgroups;
  const int warpgroup = consumer % C::kWarpgroups;
  const int warp = warpgroup * 4 + threadIdx.x % kWarpgroup / 32;
  int32_t* scratch = scratches + threadIdx.x / 32 * (C::kPieceBytes / 4);
  int32_t d[C::kBlocks][C::kRight / 2];
  Cursor<C> at;
  int turn = 0;
  uint32_t parity = group == 0 ? 1 : 0;  // the first group's first turn is there from the beginning
  for (int item = blockIdx.x; item < p.items; item += gridDim.x, turn = (turn + 1) % C::kGroups) {
    const Work w = work_of(p, item);
    if (turn != group) {
      at.skip(w.steps);
      continue;
    }
    if constexpr (C::kGroups > 1) wait_phase(ring.turn + group, parity);
    parity ^= 1;
    multiply<C>(ring, at, w.steps, warpgroup, d);
    if (C::kGroups > 1 && threadIdx.x % 32 == 0) arrive(ring.turn + (group + 1) % C::kGroups);
    finish<C>(p, sums, out, w, warp, d, scratch);
  }
}

template <class C, class Sums>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
         const __grid_constant__ Problem p, const __grid_constant__ Sums sums,
         const __grid_constant__ Output out) {
  constexpr bool kMoveRegisters = C::kThreads > 256;  // else every thread can have them all
  uint8_t* shared = dynamic_shared<uint8_t>();
  int32_t* scratches = reinterpret_cast<int32_t*>(shared + C::kStages * C::kStageBytes);
  constexpr int kScratchInts = 4 * C::kConsumers * C::kPieceBytes / 4;  // of four warps each
  Barrier* full = reinterpret_cast<Barrier*>(scratches + kScratchInts);
  const Ring<C> ring = {shared, full, full + C::kStages, full + 2 * C::kStages};
  if (threadIdx.x == 0) init_barriers(ring);
  __syncthreads();
  if constexpr (C::kCluster > 1) sync_cluster();  // before the other blocks' barriers are used
  if (threadIdx.x / kWarpgroup == C::kConsumers) {
    if constexpr (kMoveRegisters) release_registers<40>();
    if (threadIdx.x % kWarpgroup == 0) {
      prefetch_map(&left);
      prefetch_map(&right);
      produce(ring, &left, &right, p);
    }
  } else {
    if constexpr (kMoveRegisters) take_registers<232>();
    consume(ring, p, sums, out, scratches);
  }
  if constexpr (C::kCluster > 1) sync_cluster();  // others still arrive at this block's barriers
}

}  // namespace qfx::cuda::sm90
