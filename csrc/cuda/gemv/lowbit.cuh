// lowbit_linear of lowbit.h without tensor cores, for float32. A block has
// the columns of a panel, or of a part of it, and its warps share K. (W4)
#pragma once

#include "cuda/gemv/lowbit_codes.cuh"
#include "cuda/gemv/store.cuh"

namespace qfx::cuda {

inline constexpr int kLowbitWarps = 4, kLowbitThreads = 32 * kLowbitWarps;

// How a block works.
struct LowbitPlan {
  int lanes;     // lanes that share an octet, each with its own columns: 8, 4 or 2
  bool vectors;  // rows of x begin at multiples of 16 bytes and consist of whole octets
};

// The rows of x that a block multiplies, one after the other. Beyond the last it is repeated.
struct FewRows {
  const float* first;
  int64_t pitch;
  int count;
};

// Adds the products of an octet of x to sums[row][column].
template <int kBits, Shift kShift, int kRows>
__device__ __forceinline__ void add_octet(bool bfloat16, const Octet& octet, const FewRows& x,
                                          int64_t k, int count, bool vectors,
                                          float (&sums)[kRows][kQuad]) {
  constexpr bool kMinimums = kShift == Shift::kMinimums;
  const unsigned zeros = kMinimums ? 0u : octet.shift.x;
  float scale[kQuad], minimum[kQuad] = {}, w[kQuad][kOctet];
  floats_of_halves(octet.scale, bfloat16, scale);
  if (kMinimums) floats_of_halves(octet.shift, bfloat16, minimum);
#pragma unroll
  for (int c = 0; c < kQuad; ++c) {
    floats_of_octet<kBits>(octet, c, above_two_to_23(zeros, c), w[c]);
  }
  const float* row = x.first + k;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float v[kOctet];
    load_piece<false>(row, count, vectors, v);
    if (r + 1 < x.count) row += x.pitch;
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      float dot = v[0] * w[c][0];
#pragma unroll
      for (int j = 1; j < kOctet; ++j) dot = fmaf(v[j], w[c][j], dot);
      sums[r][c] = fmaf(dot, scale[c], sums[r][c]);
    }
    if (!kMinimums) continue;
    float total = v[0];
#pragma unroll
    for (int j = 1; j < kOctet; ++j) total = total + v[j];
#pragma unroll
    for (int c = 0; c < kQuad; ++c) sums[r][c] = fmaf(total, minimum[c], sums[r][c]);
  }
}

// Adds kAtOnce octets from i on, which are loaded before the first is used.
template <int kBits, Shift kShift, int kAtOnce, int kRows>
__device__ __forceinline__ void add_octets(bool bfloat16, const LowbitLane& lane, const FewRows& x,
                                           int64_t k, bool vectors, int i, int step,
                                           float (&sums)[kRows][kQuad]) {
  Octet octets[kAtOnce];
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) octets[a] = load_octet<kBits, kShift>(lane, i + a * step);
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) {
    const int64_t from = int64_t{i + a * step} * kOctet;
    const int count = static_cast<int>(k - from < kOctet ? k - from : kOctet);
    add_octet<kBits, kShift, kRows>(bfloat16, octets[a], x, from, vectors ? kOctet : count, vectors,
                                    sums);
  }
}

template <int kBits, int kRows>
__global__ void __launch_bounds__(kLowbitThreads, kRows == 1 ? 6 : 3)
    lowbit_only(LowbitOnly p, LowbitPlan plan) {
  struct Partial {
    float of[kLowbitWarps][kRows][LowbitWeight::kPanel];
  };
  Partial& partial = static_shared<Partial>();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // Blocks that follow each other read the same columns for other rows.
  const int row_blocks = static_cast<int>((p.rows + kRows - 1) / kRows);
  const int64_t first_row = int64_t{static_cast<int>(blockIdx.x) % row_blocks} * kRows;
  const int part = static_cast<int>(blockIdx.x) / row_blocks, parts = kQuads / plan.lanes;
  const int64_t panel = part / parts;
  const int quad = part % parts * plan.lanes;
  const int rows = static_cast<int>(p.rows - first_row < kRows ? p.rows - first_row : kRows);
  const FewRows x = {static_cast<const float*>(p.x) + first_row * p.k, p.k, rows};
  const int together = 32 / plan.lanes;  // octets of a warp's load
  const int first = warp * together + lane / plan.lanes, step = kLowbitWarps * together;
  const int octets = static_cast<int>((p.k + kOctet - 1) / kOctet);
  const LowbitHeader header = header_of(p.w);
  const LowbitLane from = lane_of(p.w, header, panel, static_cast<unsigned>(first),
                                  static_cast<unsigned>(quad + lane % plan.lanes));
  float sums[kRows][kQuad] = {};
  with_shift(header.shift, [&](auto shift) {
    constexpr Shift kShift = decltype(shift)::value;
    constexpr int kAtOnce = kRows > 4 ? 1 : 4;  // more rows hide a load by their products
    int i = first;
    for (; plan.vectors && i + (kAtOnce - 1) * step < octets; i += kAtOnce * step) {
      add_octets<kBits, kShift, kAtOnce>(header.bfloat16, from, x, p.k, true, i, step, sums);
    }
    for (; i < octets; i += step) {
      add_octets<kBits, kShift, 1>(header.bfloat16, from, x, p.k, plan.vectors, i, step, sums);
    }
  });
  for (int with = 16; with >= plan.lanes; with /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kQuad; ++c) {
        sums[r][c] = sums[r][c] + __shfl_xor_sync(kAllLanes, sums[r][c], with);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      if (lane < plan.lanes) partial.of[warp][r][kQuad * lane + c] = sums[r][c];
    }
  }
  __syncthreads();
  const int columns = kQuad * plan.lanes;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * columns; i += kLowbitThreads) {
    const int r = i / columns, c = i % columns;
    const int64_t m = first_row + r, n = panel * LowbitWeight::kPanel + kQuad * quad + c;
    if (m >= p.rows || n >= p.n) continue;
    float sum = 0.f;
    for (int of = 0; of < kLowbitWarps; ++of) sum = sum + partial.of[of][r][c];
    store_value(p, m, n, sum);
  }
}

}  // namespace qfx::cuda
