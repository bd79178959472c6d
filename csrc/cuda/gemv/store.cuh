// How the kernels for few rows store an output.
#pragma once

#include "cuda/rows/epilogue.cuh"

namespace qfx::cuda {

// Output [m][n] of a problem, from its sum with all scales: bias, activation, one rounding. (E1)
template <typename Problem>
__device__ __forceinline__ void store_value(const Problem& p, int64_t m, int64_t n, float sum) {
  const float v = p.bias.data == nullptr ? sum : sum + load_float(p.bias.data, p.bias.dtype, n);
  with_activation(p.activation, [&](auto activation) {
    const float y = activate<decltype(activation)::value>(v);
    with_type(p.dtype, [&](auto zero) {
      using Y = decltype(zero);
      static_cast<Y*>(p.y)[m * p.n + n] = static_cast<Y>(y);
    });
  });
}

}  // namespace qfx::cuda
