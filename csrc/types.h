// Types that kernels for all devices share.
#pragma once

#include <cstdint>
#include <iterator>

namespace qfx {

// An int32 sum of K products of (code - zero point) in [-255, 255] and a weight in [-128, 127].
inline constexpr int64_t kMaxK = 65792;

// An int32 sum of this many products of two codes less their zero points, both in [-255, 255].
inline constexpr int64_t kMaxGroup = 33025;

// Elements of K that share a scale come in multiples of this, and on CUDA of kCudaGroupMultiple.
inline constexpr int64_t kGroupMultiple = 32, kCudaGroupMultiple = 64;

enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };
enum class Activation : int {
#define QFX_ACTIVATION(value, name, in_float) value,
#include "activations.inc"
#undef QFX_ACTIVATION
};
inline constexpr Activation kActivations[] = {
#define QFX_ACTIVATION(value, name, in_float) Activation::value,
#include "activations.inc"
#undef QFX_ACTIVATION
};
inline constexpr const char* kActivationNames[] = {
#define QFX_ACTIVATION(value, name, in_float) #name,
#include "activations.inc"
#undef QFX_ACTIVATION
};
inline constexpr int kDtypes = 3, kOutputs = static_cast<int>(std::size(kActivations)) * kDtypes;

// An activation as an argument, for `use(auto activation)` to have it as a constant.
template <Activation kValue>
struct ActivationValue {
  static constexpr Activation value = kValue;
};

// A number below kOutputs.
constexpr int output_of(Activation activation, Dtype dtype) {
  return static_cast<int>(activation) * kDtypes + static_cast<int>(dtype);
}

// How floats become codes.
struct CodeSpec {
  int bits;
  bool symmetric;
  bool per_tensor;  // one scale for all finite rows of the matrix instead of one per row
};

// What becomes of a row before it is quantized: R (x * factor). (R1)
struct Transform {
  const float* factor = nullptr;  // [n], or null: 1
  int rotation = 0;  // the size of R's largest blocks, a power of two to 256; 0 without R
};

// The rotations that a code may have. (R1)
constexpr bool is_rotation(int64_t rotation) {
  return rotation == 0 || rotation == 16 || rotation == 64;
}

}  // namespace qfx
