// Sums over the lanes of a warp, the same in every lane and in a fixed order.
#pragma once

#include "cuda/core/ptx.cuh"

namespace qfx::cuda {

template <typename T>
__device__ __forceinline__ T sum_of_warp(T value) {
#pragma unroll
  for (int with = 16; with > 0; with /= 2) value = value + __shfl_xor_sync(kAllLanes, value, with);
  return value;
}

}  // namespace qfx::cuda
