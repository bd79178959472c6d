// The recurrence of an LSTM or a GRU layer: at each step the product of the state with the
// recurrent weight, in int8, and the gates, in float. (L1) (L2)
#pragma once

#include <span>

#include "cpu/gemm/linear.h"

namespace qfx::cpu {

// A layer, in one direction. `h`: how the state becomes codes; its matrix has the transform alone.
struct RecurrentLayer {
  enum class Cell { kLstm, kGru };
  Cell cell;
  const Weight& w;    // [G H, H], G the gates
  const float* bias;  // [G H], or null
  QuantizedFloats h;
};

// Rows [.., G H] and [.., H] of the steps, one step after the other, and the state [B, H], which
// becomes that after the last step.
struct Sequence {
  const void* x;
  Dtype x_dtype;
  std::span<const int64_t> batch;  // how many rows each step has, the first rows of the state
  bool reverse;                    // from the last step to the first
  char *y, *h;
  Dtype dtype;  // of y and h
  float* c;     // of an LSTM
};

void recur(const Kernels& kernels, const RecurrentLayer& layer, const Sequence& sequence);

}  // namespace qfx::cpu
