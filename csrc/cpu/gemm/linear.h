// Linears of float rows, which are quantized as they come, as operators and programs run them.
#pragma once

#include <span>

#include "cpu/gemm/lowbit_product.h"
#include "cpu/gemm/product.h"

namespace qfx::cpu {

// A weight, and where the products by it go.
struct Linear {
  const PackedWeight& w;
  FloatOutput to;
};

// to.data[m][n] of x's rows for each, which have one K; the scales of these go to scales[m]. `how`:
// or null for what is set.
void linears_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                     std::span<const Linear> all, float* scales, const Streaming* how = nullptr);

// The same with weights of few bits. `group`: of x, or 0.
void lowbit_linears_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                            int64_t group, std::span<const LowbitLinear> all,
                            const Streaming* how = nullptr);

}  // namespace qfx::cpu
