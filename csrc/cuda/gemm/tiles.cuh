// A tile of an integer product by one block of threads:
//     sum[m][n] = sum_k a[m][k] b[n][k],   m < Tile::kM, n < Tile::kN
// Both operands are rows of bytes, k contiguous: int8, or 8 bits each. Rows begin at multiples of
// 16 bytes and are zero padded to 16 bytes in one operand at least. What lies beyond M, N and K is
// taken for 0. Steps of 64 bytes pass through a ring of stages in shared memory, from there by
// ldmatrix into tensor cores.
#pragma once

#include "cuda/gemm/multiply.cuh"
#include "cuda/gemm/plan.h"

namespace qfx::cuda {

template <TileShape shape, int warps_m, int warps_n, int stages>
struct Tile {
  static constexpr TileShape kShape = shape;
  static constexpr int kM = size_of(shape).m, kN = size_of(shape).n;
  static constexpr int kWarpsN = warps_n, kStages = stages;
  static constexpr int kThreads = 32 * warps_m * warps_n;
  static constexpr int kWarpM = kM / warps_m, kWarpN = kN / warps_n;  // a warp's part
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
  static constexpr int kStageBytes = (kM + kN) * kStepBytes;
  static constexpr int kElements = kM * kN;
  // Blocks of a multiprocessor, at least, which bounds the registers of a thread. Turing's shared
  // memory holds one large tile.
  static constexpr int kResident = kThreads == 256 && kHasWideProducts ? 2 : 1;
  static constexpr int kSharedBytes = std::max(stages * kStageBytes, 4 * kElements);
  using Sums = int32_t[kBlocksM][kBlocksN][4];

  // A block finishes a tile together. Where element (row, column) lies meanwhile: four rows, which
  // a quarter of a warp writes at once, in different banks; four columns stay together.
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int at(int row, int column) { return row * kN + (column ^ (row & 3) << 3); }
};
using Small = Tile<TileShape::k16x64, 1, 4, 8>;
using Medium = Tile<TileShape::k64x64, 2, 2, 4>;
using Large = Tile<TileShape::k128x128, 2, 4, 4>;

// Rows of an operand from its tile on.
struct TileRows {
  const int8_t* data;
  int64_t pitch;
  int count;  // that exist
};

// Chunk c of 16 bytes of row r: eight rows of one chunk, which ldmatrix reads at once, lie in
// different banks.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  return row * kStepBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

template <int kRows, int kThreads>
__device__ __forceinline__ void copy_step(uint8_t* to, const TileRows& rows, int64_t first_byte,
                                          int64_t k_bytes) {
#pragma unroll
  for (int i = 0; i < kRows * 4; i += kThreads) {
    const int index = i + static_cast<int>(threadIdx.x);
    const int row = index / 4, chunk = index % 4;
    if (kRows * 4 % kThreads != 0 && row >= kRows) break;
    const int64_t byte = first_byte + chunk * 16;
    const bool there = row < rows.count && byte < k_bytes;
    const int8_t* from = there ? rows.data + row * rows.pitch + byte : rows.data;
    copy_chunk(to + chunk_at(row, chunk), from, there);
  }
}

// The sums that a thread holds: those of rows row_of(i, h) and columns column_of(j) + e at
// sums[i][j][2 h + e].
template <class T>
struct Fragment {
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int first_row() { return warp() / T::kWarpsN * T::kWarpM; }
  __device__ static int first_column() { return warp() % T::kWarpsN * T::kWarpN; }
  __device__ static int row_of(int i, int h) { return first_row() + 16 * i + lane() / 4 + 8 * h; }
  __device__ static int column_of(int j) { return first_column() + 8 * j + lane() % 4 * 2; }
};

// sums += one step of both operands in shared memory.
template <class T, class Multiply>
__device__ __forceinline__ void multiply_step(const uint8_t* a, const uint8_t* b,
                                              typename T::Sums& sums, const Multiply& multiply) {
  using F = Fragment<T>;
  const int lane = F::lane(), octet = lane / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 32 bytes each
    unsigned a_blocks[T::kBlocksM][4], b_blocks[T::kBlocksN / 2][4];
#pragma unroll
    for (int i = 0; i < T::kBlocksM; ++i) {
      const int row = F::first_row() + 16 * i + lane % 16;
      load_matrices(a_blocks[i], a + chunk_at(row, 2 * half + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < T::kBlocksN / 2; ++j) {
      const int row = F::first_column() + 16 * j + octet / 2 * 8 + lane % 8;
      load_matrices(b_blocks[j], b + chunk_at(row, 2 * half + octet % 2));
    }
#pragma unroll
    for (int i = 0; i < T::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocksN; ++j) {
        const uint32_t* pair = b_blocks[j / 2] + j % 2 * 2;
        multiply(sums[i][j], a_blocks[i], {pair[0], pair[1]});
      }
    }
  }
}

// Adds steps first, first + 1, ..., end - 1 to sums; after(step) runs after each. Ends with a
// barrier: shared memory is free again.
template <class T, class Multiply, class After>
__device__ __forceinline__ void multiply_tile(uint8_t* shared, const TileRows& a, const TileRows& b,
                                              int64_t k_bytes, int first, int end,
                                              typename T::Sums& sums, const Multiply& multiply,
                                              const After& after) {
  const auto stage = [&](int step) { return shared + step % T::kStages * T::kStageBytes; };
  const auto copy = [&](int step) {
    if (step < end) {
      uint8_t* to = stage(step);
      copy_step<T::kM, T::kThreads>(to, a, int64_t{step} * kStepBytes, k_bytes);
      copy_step<T::kN, T::kThreads>(to + T::kM * kStepBytes, b, int64_t{step} * kStepBytes,
                                    k_bytes);
    }
    copy_group_commit();
  };
  for (int step = first; step < first + T::kStages - 1; ++step) copy(step);
  for (int step = first; step < end; ++step) {
    copy_group_wait<T::kStages - 2>();
    __syncthreads();  // the step is there for all, and all have left the stage that is copied to
    copy(step + T::kStages - 1);
    multiply_step<T>(stage(step), stage(step) + T::kM * kStepBytes, sums, multiply);
    after(step);
  }
  copy_group_wait<0>();
  __syncthreads();
}

// From registers to shared memory, as the same bits.
template <class T, class Element>
__device__ __forceinline__ void stage_tile(Element* staged,
                                           const Element (&sums)[T::kBlocksM][T::kBlocksN][4]) {
  using F = Fragment<T>;
#pragma unroll
  for (int i = 0; i < T::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kBlocksN; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Element* to = staged + T::at(F::row_of(i, h), F::column_of(j));
        to[0] = sums[i][j][2 * h];
        to[1] = sums[i][j][2 * h + 1];
      }
    }
  }
  __syncthreads();
}

// Which tile a block has. Tiles of eight rows of tiles follow each other, so that what runs at one
// time reads few parts of both operands.
struct TilePlace {
  int64_t batch, m, n;  // of the tile's first element

  template <class T>
  __device__ static TilePlace of(const TileGrid& grid, unsigned index) {
    constexpr unsigned kBand = 8;
    const unsigned tile = index % (grid.down * grid.across);
    const unsigned first = tile / (kBand * grid.across) * kBand;
    const unsigned high = grid.down - first < kBand ? grid.down - first : kBand;
    const unsigned in_band = tile % (kBand * grid.across);
    const int64_t m = int64_t{first + in_band % high} * T::kM;
    return {index / (grid.down * grid.across), m, int64_t{in_band / high} * T::kN};
  }
};

}  // namespace qfx::cuda
