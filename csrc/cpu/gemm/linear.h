// Linears of float rows, which are quantized as they come, as operators and programs run them.
#pragma once

#include "cpu/gemm/lowbit.h"
#include "cpu/gemm/product.h"

namespace qfx::cpu {

// to.data[m][n] of x's rows; the scales of these go to scales[m]. `how`: or null for what is set.
void linear_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                    const PackedWeight& w, const FloatOutput& to, float* scales,
                    const Streaming* how = nullptr);

// The same with a weight of few bits. `group`: of x, or 0.
void lowbit_linear_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                           int64_t group, const LowbitWeight& w, const FloatOutput& to,
                           const Streaming* how = nullptr);

}  // namespace qfx::cpu
