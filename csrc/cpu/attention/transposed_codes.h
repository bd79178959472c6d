// The columns of a matrix as left operands of products that contract its rows.
#pragma once

#include "cpu/attention/products.h"

namespace qfx::cpu {

// A matrix of floats [R, C], held transposed. Each column becomes symmetric codes with a scale of
// its own, unrotated, (Q1), (Q3) and (Q4).
class TransposedCodes {
 public:
  // For so many rows and columns at most.
  void reserve(const Kernels& kernels, int64_t rows, int64_t columns);

  // Row r = (x - center) * factor; no center where that is null.
  void set_row(int64_t r, const float* x, const float* center, float factor);

  // Codes of rows 0..rows, a multiple of 32, and zeros up to `depth`.
  void quantize(int64_t rows, int64_t depth);

  // The codes of rows 0..depth as operands.
  void arrange(int64_t depth);

  // out[c * stride + n] += scale[c] * float(sum over rows of code[row][c] panel[row][n]), n < 32;
  // `sums`: of the panel's columns.
  void add_product(const int8_t* panel, const int32_t* sums, float* out, int64_t stride);

  void release() const { qfx::cpu::release(*rows_.format); }

 private:
  const Kernels* kernels_ = nullptr;
  int64_t columns_ = 0, stride_ = 0, code_stride_ = 0, depth_ = 0;
  Rows rows_ = {};
  RowsMemory memory_;
  Scratch floats_, codes_, tiles_;
  float *x_ = nullptr, *scale_ = nullptr, *work_ = nullptr;
  int8_t* q_ = nullptr;
  int32_t* tile_ = nullptr;
};

}  // namespace qfx::cpu
