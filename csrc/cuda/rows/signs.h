// Signs of rows as bits, for products of signs. (H1)
//     bits[row][k / 32] >> (k % 32) & 1 = (x[row][k] >= 0),  zeros from K on
#pragma once

#include <cstdint>

#include "cuda/core/stream.h"

namespace qfx::cuda {

enum class Element : int { kFloat32, kBFloat16, kFloat16, kFloat64, kInt8 };

struct Signs {
  uint32_t* bits;  // [rows][words]
  int64_t words;   // of a row, a multiple of 4
  int32_t* set;    // [rows], how many are set
  float* scale;    // [rows], 1, or NaN where a NaN is in the row; null: not wanted
};

void signs_of_rows(const void* x, Element type, int64_t rows, int64_t k, const Signs& out,
                   Stream stream);

}  // namespace qfx::cuda
