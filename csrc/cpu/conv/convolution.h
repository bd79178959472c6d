// Convolutions of floats by a packed weight: linears of the windows of an image. (C2)
#pragma once

#include "cpu/conv/geometry.h"
#include "cpu/gemm/linear.h"

namespace qfx::cpu {

// How windows become codes, as QuantizedFloats has it.
struct WindowCode {
  CodeSpec spec;
  int64_t group;
  Transform transform;
};

// to.data[row][n] of each window; see Windows. The bits are those of linears_of_floats by
// the rows that im2col gives.
void convolution(const Kernels& kernels, const Image& x, const Windows& of, const WindowCode& code,
                 const Linear& linear);

}  // namespace qfx::cpu
