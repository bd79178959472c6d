// Operand format u8 = q + kOffset; the row constant kOffset * colsum[n] is taken off in the
// epilogue. The padding is zero: the weights are zero there.
#pragma once

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

using Bytes32 = uint8_t __attribute__((vector_size(32)));
using Bytes16 = uint8_t __attribute__((vector_size(16)));

// Adds the offset to codes, as many as Bytes holds at a time, from the i-th on; returns how many it
// has come to.
template <int kOffset, typename Bytes>
inline int64_t offset_blocks(const int8_t* q, int64_t i, int64_t k, uint8_t* a) {
  constexpr int64_t kBytes = sizeof(Bytes);
  for (; i + kBytes <= k; i += kBytes) {
    Bytes v;
    __builtin_memcpy(&v, q + i, kBytes);
    v += static_cast<uint8_t>(kOffset);
    __builtin_memcpy(a + i, &v, kBytes);
  }
  return i;
}

// `a` may be q.
template <int kOffset>
int32_t arrange_offset(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  int64_t i = kOffset == 0 && reinterpret_cast<const uint8_t*>(q) == a ? k : 0;
  i = offset_blocks<kOffset, Bytes32>(q, i, k, a);
  i = offset_blocks<kOffset, Bytes16>(q, i, k, a);
  for (; i < k; ++i) a[i] = static_cast<uint8_t>(q[i] + kOffset);
  for (; i < padded_k; ++i) a[i] = 0;
  return 0;
}

}  // namespace
}  // namespace qfx::cpu
