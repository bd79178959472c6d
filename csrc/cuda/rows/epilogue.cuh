// An exact int32 sum becomes a result: scale, bias, activation, one rounding. (E1) (E2) (E3)
// Activation and type are template values: a switch inside unrolled code takes minutes to compile.
#pragma once

#include "cuda/core/types.cuh"

namespace qfx::cuda {

// The activations, each under the name of its row in activations.inc. (E2)
namespace activations {

__device__ __forceinline__ float none(float v) { return v; }

__device__ __forceinline__ float relu(float v) { return v < 0.f ? 0.f : v; }

__device__ __forceinline__ float gelu(float v) {
  return 0.5f * v * (1.f + erff(v * 0.70710678118654752f));
}

__device__ __forceinline__ float gelu_tanh(float v) {
  const float inner = 0.79788456080286536f * (v + 0.044715f * (v * v * v));
  return 0.5f * v * (1.f + tanhf(inner));
}

__device__ __forceinline__ float silu(float v) { return v / (1.f + expf(-v)); }

__device__ __forceinline__ float quick_gelu(float v) { return v / (1.f + expf(-1.702f * v)); }

__device__ __forceinline__ float relu6(float v) { return v > 6.f ? 6.f : relu(v); }

__device__ __forceinline__ float hardswish(float v) { return v * relu6(v + 3.f) / 6.f; }

}  // namespace activations

template <Activation kActivation>
__device__ __forceinline__ float activate(float v);
#define QFX_ACTIVATION(value, name, in_float)                             \
  template <>                                                             \
  __device__ __forceinline__ float activate<Activation::value>(float v) { \
    return activations::name(v);                                          \
  }
#include "activations.inc"
#undef QFX_ACTIVATION

// (E1) of scale_m * wscale_n and, if there is one, bias_n.
template <Activation kActivation>
__device__ __forceinline__ float finish(int32_t acc, float scale, bool has_bias, float bias) {
  float v = static_cast<float>(acc) * scale;
  if (has_bias) v = v + bias;
  return activate<kActivation>(v);
}

// acc - zero point, or sums with a correction: wraps, as the exact result fits.
__device__ __forceinline__ int32_t minus(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// Calls use(ActivationValue<...>{}), on the host and on the device, there outside of loops: the
// values become templates.
#pragma nv_exec_check_disable
template <typename Use>
__host__ __device__ __forceinline__ void with_activation(Activation activation, const Use& use) {
  switch (activation) {
#define QFX_ACTIVATION(value, name, in_float) \
  case Activation::value:                     \
    return use(ActivationValue<Activation::value>{});
#include "activations.inc"
#undef QFX_ACTIVATION
  }
}

}  // namespace qfx::cuda
