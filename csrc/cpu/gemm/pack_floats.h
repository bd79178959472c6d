// Floats w[n][k] -> symmetric codes with one scale for each n (Q1), packed as pack.h says.
#pragma once

#include "cpu/core/scratch.h"
#include "cpu/gemm/gemm.h"
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

// w in codes, once its panels are filled; scale is [N], zero padded to whole panels.
struct FloatPanels final : PanelSource {
  const Kernels& kernels;
  StridedFloats w;
  CodeSpec spec;
  float* scale;
  int32_t* colsum;
  int8_t* blocks;

  FloatPanels(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
              PackMemory& memory);

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const;  // of all panels, in parallel.h's unit
};

// The same when all of it is done.
PackedWeight pack_floats(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
                         PackMemory& memory);

}  // namespace qfx::cpu
