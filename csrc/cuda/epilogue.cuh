// From exact sums to outputs: equations (E1) and (E2). Every operation is one float32 operation in
// the order of the equations; the code is compiled without contraction.
#pragma once

#include <type_traits>

#include "cuda/gemm.h"
#include "cuda/types.cuh"

namespace qfx::cuda {

// (E2)
template <Activation A>
__device__ __forceinline__ float activate(float v) {
  if constexpr (A == Activation::kRelu) return v < 0.f ? 0.f : v;
  if constexpr (A == Activation::kSilu) return v / (1.f + expf(-v));
  if constexpr (A == Activation::kGelu) return 0.5f * v * (1.f + erff(v * 0.707106781186547524f));
  if constexpr (A == Activation::kGeluTanh) {
    const float u = 0.797884560802865356f * (v + 0.044715f * v * v * v);
    return 0.5f * v * (1.f + tanhf(u));
  }
  return v;
}

// Calls f with the activation as a type, so that loops are compiled for each.
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, const F& f) {
  const auto call = [&]<Activation A>() { f(std::integral_constant<Activation, A>{}); };
  switch (activation) {
    case Activation::kNone:
      return call.template operator()<Activation::kNone>();
    case Activation::kRelu:
      return call.template operator()<Activation::kRelu>();
    case Activation::kGelu:
      return call.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return call.template operator()<Activation::kGeluTanh>();
    case Activation::kSilu:
      return call.template operator()<Activation::kSilu>();
  }
}

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
