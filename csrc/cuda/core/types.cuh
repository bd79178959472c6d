// Element types of floats in kernels: pieces of rows as float32. bfloat16 and float16 become
// float32 exactly; results are rounded once, to nearest, ties to even.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "cuda/core/ptx.cuh"
#include "types.h"

namespace qfx::cuda {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

constexpr int kPiece = 8;  // consecutive elements that a thread loads and stores together

// v = from[0..count), then zeros. `aligned`: 16 bytes at a time, of a whole piece. kOnce: nobody
// else reads them.
template <bool kOnce = true, typename T>
__device__ __forceinline__ void load_piece(const T* from, int count, bool aligned,
                                           float (&v)[kPiece]) {
  constexpr int kAtOnce = 16 / sizeof(T);
  if (aligned && count == kPiece) {
#pragma unroll
    for (int i = 0; i < kPiece; i += kAtOnce) {
      const uint4* place = reinterpret_cast<const uint4*>(from + i);
      const uint4 bits = kOnce ? load_once(place) : __ldg(place);
      const T* values = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) v[i + j] = static_cast<float>(values[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = i < count ? static_cast<float>(from[i]) : 0.f;
}

template <typename T>
__device__ __forceinline__ void store_piece(T* to, int count, bool aligned,
                                            const float (&v)[kPiece]) {
  constexpr int kAtOnce = 16 / sizeof(T);
  if (aligned && count == kPiece) {
#pragma unroll
    for (int i = 0; i < kPiece; i += kAtOnce) {
      uint4 bits;
      T* values = reinterpret_cast<T*>(&bits);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) values[j] = static_cast<T>(v[i + j]);
      *reinterpret_cast<uint4*>(to + i) = bits;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (i < count) to[i] = static_cast<T>(v[i]);
  }
}

// Element i of floats of a type that is known at run time: of a bias.
__device__ __forceinline__ float load_float(const void* from, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::kFloat32:
      return static_cast<const float*>(from)[i];
    case Dtype::kBFloat16:
      return static_cast<float>(static_cast<const BFloat16*>(from)[i]);
    default:
      return static_cast<float>(static_cast<const Half*>(from)[i]);
  }
}

// Calls use(T{}) with the element type of `dtype`; on the host and on the device.
#pragma nv_exec_check_disable
template <typename Use>
__host__ __device__ __forceinline__ void with_type(Dtype dtype, const Use& use) {
  switch (dtype) {
    case Dtype::kFloat32:
      return use(float{});
    case Dtype::kBFloat16:
      return use(BFloat16{});
    default:
      return use(Half{});
  }
}

}  // namespace qfx::cuda
