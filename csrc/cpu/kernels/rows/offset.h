// Operand format u8 = q + kOffset; the row constant kOffset * colsum[n] is taken off in the
// epilogue. The padding is zero: the weights are zero there.
#pragma once

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// `a` may be q.
template <int kOffset>
int32_t arrange_offset(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  using Bytes = uint8_t __attribute__((vector_size(32)));
  constexpr int64_t kBytes = sizeof(Bytes);
  int64_t i = kOffset == 0 && reinterpret_cast<const uint8_t*>(q) == a ? k : 0;
  for (; i + kBytes <= k; i += kBytes) {
    Bytes v;
    __builtin_memcpy(&v, q + i, kBytes);
    v += static_cast<uint8_t>(kOffset);
    __builtin_memcpy(a + i, &v, kBytes);
  }
  for (; i < k; ++i) a[i] = static_cast<uint8_t>(q[i] + kOffset);
  for (; i < padded_k; ++i) a[i] = 0;
  return 0;
}

}  // namespace
}  // namespace qfx::cpu
