// Float activations times int8 weights, made for a few rows: the weight is read once for eight
// rows.
//     y[m][n] = act(sum_k x[m][k] w[n][k] * scale[n] + bias[n])       (W2)
#pragma once

#include "cuda/gemm/gemm.h"

namespace qfx::cuda {

struct WeightOnly {
  const void* x;  // [rows][k]
  Dtype x_dtype;
  int64_t rows, n, k;
  const int8_t* w;  // [n][pitch]
  int64_t pitch;
  const float* scale;
  AnyFloats bias;
  Activation activation;
  Dtype dtype;
  void* y;
};

void weight_linear(const WeightOnly& problem, int multiprocessors, Stream stream);

}  // namespace qfx::cuda
