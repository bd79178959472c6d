// Linears by a packed weight of any kind, as operators and programs run them. Only this file
// distinguishes the kinds.
#pragma once

#include <span>

#include "cpu/gemm/group_rows.h"
#include "cpu/gemm/weight.h"

namespace qfx::cpu {

// A weight, and where the products by it go.
struct Linear {
  const Weight& w;
  FloatOutput to;
};

// Floats [M, K] that are quantized as they come. `group`: elements of K that share a scale, or 0.
struct QuantizedFloats {
  FloatMatrix x;
  CodeSpec spec;
  int64_t group = 0;
};

// to.data[m][n] for each of the weights, which have one K. `sizes`, if not null, becomes the root
// mean square of the scales of each row's elements. `how`: or null for what is set.
void linears_of_floats(const Kernels& kernels, const QuantizedFloats& from,
                       std::span<const Linear> all, const Streaming* how = nullptr,
                       double* sizes = nullptr);

// Codes q [rows, K], their scales and zero points.
struct CodeMatrix {
  const int8_t* q;
  int64_t rows;
  RowValues<float> scale;
  RowValues<int32_t> zero;
};

void linear_of_codes(const Kernels& kernels, const CodeMatrix& from, const Linear& linear);

// Products of floats that stay floats with codes. (W1) (W3)
void linear_unquantized(const Kernels& kernels, const FloatMatrix& x, const Linear& linear);

}  // namespace qfx::cpu
