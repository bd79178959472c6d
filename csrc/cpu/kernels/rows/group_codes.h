// Quantization of a row whose groups have scales of their own. (Q1) to (Q4)
#pragma once

#include "cpu/kernels/rows/quantize.h"
#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline void quantize_groups_of_row(const float* x, int64_t n, int64_t group, const CodeSpec* spec,
                                   const GroupCodes* to) {
  const CodeSpec kept = *spec;
  float* scale = to->scale;
  int32_t* zero_point = to->zero_point;
  int8_t* q = to->q;
  for (int64_t k = 0; k < n; k += group, ++scale, ++zero_point) {
    const int64_t length = k + group < n ? group : n - k;
    const RowCode code = code_of_range(range_between(extremes_of_row(x + k, length)), kept);
    *scale = code.scale;
    *zero_point = code.zero_point;
    quantize_any<false>(x + k, length, &code, q + k);
  }
}

}  // namespace
}  // namespace qfx::cpu
