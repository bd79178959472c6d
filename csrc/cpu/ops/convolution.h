// Convolutions of floats as generated code calls them: by operands at addresses, without tensors.
#pragma once

#include "cpu/ops/linear.h"
#include "cpu/ops/windows.h"

namespace qfx::cpu {

struct ConvolutionAt {
  Image x;
  Windows of;  // those of one group of channels
  int64_t groups;
  LinearWeightAt weight;  // of the first group: the others follow, and the biases of all
  const float* factor;    // [k], or null
  ActivationCode code;
  const void* residual;  // as y, or null
  Dtype out_dtype;
  void* y;  // [B, outputs, n * groups]
};

// conv_dynamic.
void convolution_at(const char* op, const ConvolutionAt& call);

// conv_depthwise, of one group, without a factor and a residual.
void depthwise_at(const char* op, const ConvolutionAt& call);

}  // namespace qfx::cpu
