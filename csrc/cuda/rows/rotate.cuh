// The transform of a row before it is quantized, R (x * factor), or the way back. (R1) A thread
// holds 8 consecutive elements, so a block of R of more elements is held by lanes side by side.
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

template <int kBlock, bool kBack, bool kWhole>
__device__ __forceinline__ void rotate_stage(int h, int differing, float (&v)[kPiece]) {
  const int first = static_cast<int>(threadIdx.x) % (kBlock / kPiece) * kPiece;
  float partner[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    partner[i] = h < kPiece ? v[i ^ h] : __shfl_xor_sync(kAllLanes, v[i], h / kPiece);
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float turned = v[i] + (takes_off<kBack>(first + i, h) ? -partner[i] : partner[i]);
    v[i] = kWhole || (differing ^ i) >= 2 * h ? turned : v[i];
  }
}

// Powers of two to 64, to the power of -1/2.
__device__ __forceinline__ float inverse_root(int block) {
  constexpr float kOfTwo = 0.70710678118654752440;
  const float power = block >= 16 ? (block >= 64 ? 1 / 8.f : 1 / 4.f) : block >= 4 ? 1 / 2.f : 1.f;
  return (block & 0b101010) != 0 ? power * kOfTwo : power;
}

// `differing`: the bits in which the first element's place and the row's length differ. An element
// lies in a block of the highest of them, or in one of kBlock where that is smaller. kWhole: all
// lie in blocks of kBlock.
template <int kBlock, bool kBack, bool kWhole>
__device__ __forceinline__ void rotate_piece(int differing, float (&v)[kPiece]) {
#pragma unroll
  for (int h = 1; h < kBlock; h *= 2) {
    rotate_stage<kBlock, kBack, kWhole>(kBack ? kBlock / 2 / h : h, differing, v);
  }
  if constexpr (kWhole) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v[i] = v[i] * inverse_root(kBlock);
    return;
  }
  const int power = differing >= 64 ? 64 : differing >= 32 ? 32 : differing >= 16 ? 16 : 8;
  const int shared = differing < kPiece ? 0 : power < kBlock ? power : kBlock;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const int own = differing ^ i, least = own >= 4 ? 4 : own >= 2 ? 2 : 1;
    v[i] = v[i] * inverse_root(shared != 0 ? shared : least);
  }
}

template <int kBlock, bool kBack>
__device__ __forceinline__ void rotate_piece_of(int64_t k, int64_t columns, float (&v)[kPiece]) {
  if (columns % kBlock == 0) return rotate_piece<kBlock, kBack, true>(0, v);
  rotate_piece<kBlock, kBack, false>(static_cast<int>(k ^ columns), v);
}

__device__ __forceinline__ void scale_piece(const float* factor, int64_t k, int count,
                                            float (&v)[kPiece]) {
  const bool aligned = reinterpret_cast<uintptr_t>(factor) % 16 == 0;
  float by[kPiece];
  load_piece<false>(factor + k, count, aligned, by);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = v[i] * by[i];
}

// Elements k..k + 7 of a row of `columns`, of which `count` are there; all lanes of the warp come
// together.
template <bool kBack>
__device__ __forceinline__ void transform_piece(const Transform& t, int64_t columns, int64_t k,
                                                int count, float (&v)[kPiece]) {
  if (!kBack && t.factor != nullptr) scale_piece(t.factor, k, count, v);
  if (t.rotation == 16) rotate_piece_of<16, kBack>(k, columns, v);
  if (t.rotation == 64) rotate_piece_of<64, kBack>(k, columns, v);
  if (kBack && t.factor != nullptr) scale_piece(t.factor, k, count, v);
}

}  // namespace qfx::cuda
