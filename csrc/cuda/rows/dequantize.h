// Codes or sums -> floats: (Q5) and (E1), on a GPU.
#pragma once

#include <cstdint>

#include "cuda/core/stream.h"
#include "types.h"

namespace qfx::cuda {

struct Dequantize {
  const void* q;  // [rows][columns], int8 if `codes`, else int32
  bool codes;
  int64_t rows, columns;
  const float* scale;  // of each row, or of all with a step of 0
  int64_t scale_step;
  const int32_t* zero_point;  // the same; null: 0
  int64_t zero_step;
  const float* col_scale;  // [rows / rows_a_scale][columns]; null: 1
  int64_t rows_a_scale;    // consecutive rows that share column scales
  const void* bias;        // [columns]; null without
  Dtype bias_dtype;
  bool aligned = false;  // 4 columns may be read at once; dequantize finds out
};

void dequantize(const Dequantize& job, Activation activation, Dtype dtype, void* y, Stream stream);

}  // namespace qfx::cuda
