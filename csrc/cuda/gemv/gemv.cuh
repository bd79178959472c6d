// weight_linear of gemv.h. Lane l of 32 P takes the k with k / 16 mod 32 P = l, in their order. Its
// sums s_0 and s_1 are chains of those, as in (W1); s_0 + s_1 follow, then the lanes of a warp in
// pairs and the P warps in their order. (W2)
#pragma once

#include "cuda/core/warp.cuh"
#include "cuda/gemm/elements.cuh"
#include "cuda/gemv/gemv.h"
#include "cuda/gemv/store.cuh"

namespace qfx::cuda {

inline constexpr int kGemvThreads = 256, kGemvWarps = kGemvThreads / 32;
inline constexpr int kGemvColumns = 4;  // of a warp, which share the loads of x

// How a block works.
struct GemvPlan {
  int parts;     // warps that share columns, each with its own part of K
  bool vectors;  // rows of x begin at multiples of 16 bytes
};

// The bytes of a word as floats. A byte in the low end of 2^23 is 2^23 plus its value as unsigned;
// the top bit is flipped so that 128 more than the signed value is what it adds: exact.
__device__ __forceinline__ void floats_of_codes(unsigned word, float (&f)[4]) {
  const unsigned flipped = word ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = __byte_perm(flipped, 0x4b000000u, 0x7440u + static_cast<unsigned>(i));
    f[i] = __uint_as_float(bits) - 8388736.f;
  }
}

// Four activations, zeros from `end` on.
template <typename X>
__device__ __forceinline__ void floats_of_x(const X* x, int64_t k, int64_t end, bool vectors,
                                            float (&f)[4]) {
  if (vectors && k + 4 <= end) {
    const Four<X> four = *reinterpret_cast<const Four<X>*>(x + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = static_cast<float>(four.of[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) f[i] = k + i < end ? static_cast<float>(x[k + i]) : 0.f;
}

// Adds the products of 16 k to sums[row][column].
template <typename X, int kRows>
__device__ __forceinline__ void add_chunk(const WeightOnly& p, bool vectors,
                                          const X* const (&x)[kRows], int64_t k,
                                          const uint4 (&w)[kGemvColumns],
                                          float (&sums)[kRows][kGemvColumns][2]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float f[kGemvColumns][4];
#pragma unroll
    for (int c = 0; c < kGemvColumns; ++c) {
      const unsigned words[4] = {w[c].x, w[c].y, w[c].z, w[c].w};
      floats_of_codes(words[word], f[c]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float v[4];
      floats_of_x(x[r], k + 4 * word, p.k, vectors, v);
#pragma unroll
      for (int c = 0; c < kGemvColumns; ++c) {
        float (&s)[2] = sums[r][c];
        s[0] = fmaf(v[1], f[c][1], fmaf(v[0], f[c][0], s[0]));
        s[1] = fmaf(v[3], f[c][3], fmaf(v[2], f[c][2], s[1]));
      }
    }
  }
}

template <typename X, int kRows>
__global__ void __launch_bounds__(kGemvThreads) weight_only(WeightOnly p, GemvPlan plan) {
  struct Partial {
    float of[kGemvWarps][kRows][kGemvColumns];
  };
  Partial& partial = static_shared<Partial>();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int groups = kGemvWarps / plan.parts;  // of columns, in a block
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int64_t block_n = int64_t{blockIdx.x} * groups * kGemvColumns;
  const int64_t n = block_n + warp / plan.parts * kGemvColumns;
  const X* x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t m = first_row + r < p.rows ? first_row + r : p.rows - 1;
    x[r] = static_cast<const X*>(p.x) + m * p.k;
  }
  float sums[kRows][kGemvColumns][2] = {};
  const int64_t step = int64_t{plan.parts} * 512;
  for (int64_t k = (warp % plan.parts * 32 + lane) * 16; k < p.k; k += step) {
    uint4 w[kGemvColumns];
#pragma unroll
    for (int c = 0; c < kGemvColumns; ++c) {
      const int64_t column = n + c < p.n ? n + c : p.n - 1;
      w[c] = load_once(reinterpret_cast<const uint4*>(p.w + column * p.pitch + k));
    }
    add_chunk<X, kRows>(p, plan.vectors, x, k, w, sums);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kGemvColumns; ++c) {
      const float sum = sum_of_warp(sums[r][c][0] + sums[r][c][1]);
      if (lane == 0) partial.of[warp][r][c] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < groups * kRows * kGemvColumns; i += kGemvThreads) {
    const int c = i % kGemvColumns, group = i / kGemvColumns % groups;
    const int r = i / (kGemvColumns * groups);
    const int64_t m = first_row + r, column = block_n + group * kGemvColumns + c;
    if (m >= p.rows || column >= p.n) continue;
    float sum = 0.f;
    for (int part = 0; part < plan.parts; ++part)
      sum = sum + partial.of[group * plan.parts + part][r][c];
    store_value(p, m, column, sum * p.scale[column]);
  }
}

}  // namespace qfx::cuda
