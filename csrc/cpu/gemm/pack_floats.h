// Floats w[n][k] -> symmetric codes with one scale for each n (Q1), packed as pack.h says.
#pragma once

#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/quantize.h"

namespace qfx::cpu {

// One of the strides is 1, in elements.
struct StridedFloats {
  const void* data;
  Dtype dtype;
  int64_t n, k, stride_n, stride_k;
};

// What holds a result until the next one.
struct PackMemory {
  Scratch scales, colsums, blocks;
};

// scale is [N], zero padded to whole panels.
struct PackedFloats {
  PackedWeight weight;
  const float* scale;
};

PackedFloats pack_floats(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
                         PackMemory& memory);

}  // namespace qfx::cpu
