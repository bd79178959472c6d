// softmax(q k^T scale + mask) v of one matrix of a batch, in int8: equations (A1) to (A6), and in
// float.
#pragma once

#include <cstdint>

#include "cpu/quantize.h"

namespace qfx::cpu {

// What is added to the scores, [M, N] with any strides: nothing, floats, or whether a key counts.
struct Mask {
  enum class Kind { kNone, kFloat, kBool } kind = Kind::kNone;
  const char* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;  // in bytes
};

// q [M, D], k [N, D], v [N, E], rows contiguous; out [M, E].
struct Attention {
  FloatMatrix q, k, v;
  Mask mask;
  float scale;
  bool causal;  // row m sees the keys 0..m
  Dtype dtype;
  char* out;
};

void attend(const Kernels& kernels, const Attention& attention);

// The same in float, for a few queries: (A7) to (A9).
void attend_in_float(const Kernels& kernels, const Attention& attention);

// Row m of a mask in float32.
void load_mask(const Mask& mask, int64_t m, int64_t keys, float* out);

}  // namespace qfx::cpu
