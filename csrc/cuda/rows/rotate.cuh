// The transform of a row before it is quantized, R (x * factor), or the way back. (R1) A thread
// holds 8 consecutive elements, so a block of R is held by 2 or 8 lanes that lie side by side.
#pragma once

#include "cuda/core/types.cuh"

namespace qfx::cuda {

// Whether stage h takes the partner off element i of a block; see
// csrc/cpu/kernels/rows/rotate_stages.h.
template <bool kBack>
__device__ __forceinline__ bool takes_off(int i, int h) {
  constexpr int kLowBits = 0x15;
  const int at = kBack ? i ^ h : i;
  return (h & kLowBits) != 0 ? ((at & h) != 0) != ((at & 2 * h) != 0) : (at & h) != 0;
}

template <int kBlock, bool kBack>
__device__ __forceinline__ void rotate_stage(int h, float (&v)[kPiece]) {
  const int first = static_cast<int>(threadIdx.x) % (kBlock / kPiece) * kPiece;
  float partner[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    partner[i] = h < kPiece ? v[i ^ h] : __shfl_xor_sync(kAllLanes, v[i], h / kPiece);
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    v[i] = v[i] + (takes_off<kBack>(first + i, h) ? -partner[i] : partner[i]);
  }
}

template <int kBlock, bool kBack>
__device__ __forceinline__ void rotate_piece(float (&v)[kPiece]) {
  constexpr float kInverseRoot = kBlock == 16 ? 1 / 4.f : 1 / 8.f;
#pragma unroll
  for (int h = 1; h < kBlock; h *= 2) {
    rotate_stage<kBlock, kBack>(kBack ? kBlock / 2 / h : h, v);
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = v[i] * kInverseRoot;
}

__device__ __forceinline__ void scale_piece(const float* factor, int64_t k, int count,
                                            float (&v)[kPiece]) {
  const bool aligned = reinterpret_cast<uintptr_t>(factor) % 16 == 0;
  float by[kPiece];
  load_piece<false>(factor + k, count, aligned, by);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = v[i] * by[i];
}

// Elements k..k + 7 of a row, of which `count` are there; all lanes of the warp come together.
template <bool kBack>
__device__ __forceinline__ void transform_piece(const Transform& t, int64_t k, int count,
                                                float (&v)[kPiece]) {
  if (!kBack && t.factor != nullptr) scale_piece(t.factor, k, count, v);
  if (t.rotation == 16) rotate_piece<16, kBack>(v);
  if (t.rotation == 64) rotate_piece<64, kBack>(v);
  if (kBack && t.factor != nullptr) scale_piece(t.factor, k, count, v);
}

}  // namespace qfx::cuda
