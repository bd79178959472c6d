// lowbit_linear of lowbit.h for 16-bit floats on tensor cores, from 8.0 on. A block has the columns
// of a panel, and its warps share K by steps of 32 k: lane 4 g + t has octet t of columns 4 g + c
// and of row g of x. These are fragments of mma.m16n8k16 as they are, for k in another order, which
// is the same for both operands. (W4)
#pragma once

#include "cuda/gemv/lowbit_codes.cuh"
#include "cuda/gemv/store.cuh"

namespace qfx::cuda {

inline constexpr int kMmaWarps = 16;  // at most
inline constexpr int kStepK = 4 * kOctet;

// Pairs of 16-bit floats. kOffset: a float whose low bits count ones, twice.
template <typename X>
struct FloatPairs;
template <>
struct FloatPairs<BFloat16> {
  static constexpr unsigned kOffset = 0x43004300u, kOnes = 0x3f803f80u;
  static __device__ __forceinline__ unsigned minus(unsigned a, unsigned b) {
    return subtract_bf16(a, b);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    mma_bf16_16x8x16(d, a, b);
  }
};
template <>
struct FloatPairs<Half> {
  static constexpr unsigned kOffset = 0x64006400u, kOnes = 0x3c003c00u;
  static __device__ __forceinline__ unsigned minus(unsigned a, unsigned b) {
    return subtract_f16(a, b);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    mma_f16_16x8x16(d, a, b);
  }
};

// An octet of a row of x, zeros from `end` on. `vectors`: rows consist of whole, aligned octets.
template <typename X>
__device__ __forceinline__ uint4 load_x(const X* row, int64_t k, int64_t end, bool vectors) {
  if (vectors) return k < end ? __ldg(reinterpret_cast<const uint4*>(row + k)) : uint4{};
  unsigned words[4] = {};
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (k + i < end) words[i / 2] |= static_cast<unsigned>(row[k + i].x) << (16 * (i % 2));
  }
  return {words[0], words[1], words[2], words[3]};
}

// An octet of x as fragments: k 0, 2 and 1, 3, then 4, 6 and 5, 7.
__device__ __forceinline__ void pairs_of_x(const uint4& x, unsigned (&b)[2][2]) {
  constexpr unsigned kLow = 0x5410u, kHigh = 0x7632u;
  b[0][0] = __byte_perm(x.x, x.y, kLow);
  b[0][1] = __byte_perm(x.x, x.y, kHigh);
  b[1][0] = __byte_perm(x.z, x.w, kLow);
  b[1][1] = __byte_perm(x.z, x.w, kHigh);
}

// The codes of column c less its zero point, in the order of pairs_of_x; register `side` of each
// fragment's pair.
template <typename X, int kBits>
__device__ __forceinline__ void pairs_of_octet(const Octet& octet, unsigned zeros, int c,
                                               unsigned (&a)[2][4]) {
  constexpr unsigned kOffset = FloatPairs<X>::kOffset;
  const unsigned words[kQuad] = {octet.nibbles.x, octet.nibbles.y, octet.nibbles.z,
                                 octet.nibbles.w};
  const unsigned zero = __byte_perm(zeros, kOffset, 0x5050u + 0x101u * static_cast<unsigned>(c));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned fifths = 0;  // of k 0 and 2 at bits 4 and 20, of 1 and 3 one higher
    if (kBits == 5) fifths = (octet.fifths >> (16 * h + 4 * c) & 15u) * 0x00040010u;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      unsigned codes = (words[c] >> (4 * h + 8 * odd) & 0x000f000fu) | kOffset;
      if (kBits == 5) codes |= fifths >> odd & 0x00100010u;
      a[h][c % 2 + 2 * odd] = FloatPairs<X>::minus(codes, zero);
    }
  }
}

// Adds the products of 32 k to sums[tile][column][row].
template <typename X, int kBits, Shift kShift, int kTiles>
__device__ __forceinline__ void add_step(bool bfloat16, const Octet& octet,
                                         const uint4 (&x)[kTiles],
                                         float (&sums)[kTiles][kQuad][2]) {
  const unsigned zeros = kShift == Shift::kMinimums ? 0u : octet.shift.x;
  float scale[kQuad];
  unsigned b[kTiles][2][2];
  floats_of_halves(octet.scale, bfloat16, scale);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) pairs_of_x(x[tile], b[tile]);
#pragma unroll
  for (int two = 0; two < kQuad; two += 2) {
    unsigned a[2][4];
    pairs_of_octet<X, kBits>(octet, zeros, two, a);
    pairs_of_octet<X, kBits>(octet, zeros, two + 1, a);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float d[4] = {};
      FloatPairs<X>::multiply(d, a[0], b[tile][0]);
      FloatPairs<X>::multiply(d, a[1], b[tile][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[tile][two + i / 2][i % 2];
        sum = fmaf(d[i], scale[two + i / 2], sum);
      }
    }
  }
  if constexpr (kShift != Shift::kMinimums) return;
  constexpr unsigned kOnes = FloatPairs<X>::kOnes;
  const unsigned ones[4] = {kOnes, kOnes, kOnes, kOnes};
  float minimum[kQuad];
  floats_of_halves(octet.shift, bfloat16, minimum);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float d[4] = {};
    FloatPairs<X>::multiply(d, ones, b[tile][0]);
    FloatPairs<X>::multiply(d, ones, b[tile][1]);
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) sums[tile][c][e] = fmaf(d[e], minimum[c], sums[tile][c][e]);
    }
  }
}

// What a block works on: kTiles tiles of 8 rows of x, and a panel.
template <typename X, int kTiles>
struct MmaRows {
  const X* of[kTiles];  // the lane's row of each tile
  int64_t end[kTiles];  // its elements; 0 beyond the last row
};

// Adds kAtOnce steps from i on, which are loaded before the first is used.
template <typename X, int kBits, Shift kShift, int kAtOnce, int kTiles>
__device__ __forceinline__ void add_steps(bool bfloat16, const LowbitLane& lane,
                                          const MmaRows<X, kTiles>& x, bool vectors, int i,
                                          int step, float (&sums)[kTiles][kQuad][2]) {
  Octet octets[kAtOnce];
  uint4 of_x[kAtOnce][kTiles];
#pragma unroll
  for (int s = 0; s < kAtOnce; ++s) {
    const int at = 4 * (i + s * step) + static_cast<int>(threadIdx.x) % 4;
    octets[s] = load_octet<kBits, kShift>(lane, at);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      of_x[s][tile] = load_x(x.of[tile], int64_t{at} * kOctet, x.end[tile], vectors);
    }
  }
  __syncwarp();  // else nvcc loads a step only when it is needed
#pragma unroll
  for (int s = 0; s < kAtOnce; ++s) {
    add_step<X, kBits, kShift, kTiles>(bfloat16, octets[s], of_x[s], sums);
  }
}

template <typename X, int kBits, int kTiles>
__global__ void __launch_bounds__(32 * kMmaWarps, 1) lowbit_mma(LowbitOnly p, bool vectors) {
  if constexpr (kArchitecture >= 80) {
    constexpr int kRows = 8 * kTiles, kPanel = LowbitWeight::kPanel;
    struct Partial {
      float of[kMmaWarps][kRows][kPanel];
    };
    Partial& partial = static_shared<Partial>();
    const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    // Blocks that follow each other read the same columns for other rows.
    const int row_blocks = static_cast<int>((p.rows + kRows - 1) / kRows);
    const int64_t first_row = int64_t{static_cast<int>(blockIdx.x) % row_blocks} * kRows;
    const int64_t panel = static_cast<int>(blockIdx.x) / row_blocks;
    MmaRows<X, kTiles> x;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t m = first_row + 8 * tile + g;
      x.of[tile] = static_cast<const X*>(p.x) + (m < p.rows ? m * p.k : 0);
      x.end[tile] = m < p.rows ? p.k : 0;
    }
    const LowbitHeader header = header_of(p.w);
    const LowbitLane lane =
        lane_of(p.w, header, panel, static_cast<unsigned>(4 * warp + t), static_cast<unsigned>(g));
    const int steps = static_cast<int>((p.k + kStepK - 1) / kStepK);
    float sums[kTiles][kQuad][2] = {};
    with_shift(header.shift, [&](auto shift) {
      constexpr Shift kShift = decltype(shift)::value;
      constexpr int kAtOnce = kTiles > 1 ? 2 : 4;
      int i = warp;
      for (; vectors && i + (kAtOnce - 1) * warps < steps; i += kAtOnce * warps) {
        add_steps<X, kBits, kShift, kAtOnce>(header.bfloat16, lane, x, true, i, warps, sums);
      }
      for (; i < steps; i += warps) {
        add_steps<X, kBits, kShift, 1>(header.bfloat16, lane, x, vectors, i, warps, sums);
      }
    });
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2 * kQuad; ++i) {
        partial.of[warp][8 * tile + 2 * t + i % 2][kQuad * g + i / 2] = sums[tile][i / 2][i % 2];
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kPanel; i += 32 * warps) {
      const int r = i / kPanel, c = i % kPanel;
      const int64_t m = first_row + r, n = panel * kPanel + c;
      if (m >= p.rows || n >= p.n) continue;
      float sum = 0.f;
      for (int of = 0; of < warps; ++of) sum = sum + partial.of[of][r][c];
      store_value(p, m, n, sum);
    }
  }
}

}  // namespace qfx::cuda
