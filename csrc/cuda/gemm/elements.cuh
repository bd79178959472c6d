// Reading values of rows and groups, and storing four neighbours at once.
#pragma once

#include "cuda/core/types.cuh"
#include "cuda/gemm/gemm.h"

namespace qfx::cuda {

template <typename T>
__device__ __forceinline__ T at(const PerRow<T>& v, int64_t row) {
  return v.data[row * v.step];
}

template <typename T>
__device__ __forceinline__ T at(const PerGroup<T>& v, int64_t n, int64_t group) {
  return v.data[n * v.column_step + group * v.group_step];
}

// Four neighbouring elements of one type.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T of[4];
};

// Stores the first `count` of four values; `whole` where all four may be stored at once.
template <typename T, typename Value>
__device__ __forceinline__ void store_four(T* to, const Value (&v)[4], int count, bool whole) {
  Four<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.of[i] = static_cast<T>(v[i]);
  if (whole) {
    *reinterpret_cast<Four<T>*>(to) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = four.of[i];
  }
}

}  // namespace qfx::cuda
