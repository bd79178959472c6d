// An exact int32 sum becomes a result: scale, bias, activation, one rounding. (E1) (E2) (E3)
// Activation and type are template values: a switch inside unrolled code takes minutes to compile.
#pragma once

#include "cuda/core/types.cuh"

namespace qfx::cuda {

template <Activation kActivation>
__device__ __forceinline__ float activate(float v) {  // (E2)
  if constexpr (kActivation == Activation::kRelu) {
    return v < 0.f ? 0.f : v;
  } else if constexpr (kActivation == Activation::kGelu) {
    return 0.5f * v * (1.f + erff(v * 0.70710678118654752f));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const float inner = 0.79788456080286536f * (v + 0.044715f * (v * v * v));
    return 0.5f * v * (1.f + tanhf(inner));
  } else if constexpr (kActivation == Activation::kSilu) {
    return v / (1.f + expf(-v));
  } else {
    return v;
  }
}

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

template <Activation kValue>
struct ActivationValue {
  static constexpr Activation value = kValue;
};

// Calls use(ActivationValue<...>{}), on the host and on the device, there outside of loops: the
// values become templates.
#pragma nv_exec_check_disable
template <typename Use>
__host__ __device__ __forceinline__ void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::kNone:
      return use(ActivationValue<Activation::kNone>{});
    case Activation::kRelu:
      return use(ActivationValue<Activation::kRelu>{});
    case Activation::kGelu:
      return use(ActivationValue<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return use(ActivationValue<Activation::kGeluTanh>{});
    case Activation::kSilu:
      return use(ActivationValue<Activation::kSilu>{});
  }
}

}  // namespace qfx::cuda
