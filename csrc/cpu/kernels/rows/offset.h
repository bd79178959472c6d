// Operand format u8 = q + kOffset; the row constant kOffset * colsum[n] is taken off in the
// epilogue. The padding is zero: the weights are zero there.
#pragma once

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

template <int kOffset>
int32_t arrange_offset(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  for (int64_t i = 0; i < k; ++i) a[i] = static_cast<uint8_t>(q[i] + kOffset);
  for (int64_t i = k; i < padded_k; ++i) a[i] = 0;
  return 0;
}

}  // namespace
}  // namespace qfx::cpu
