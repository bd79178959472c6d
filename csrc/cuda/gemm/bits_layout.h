// The packed 1-bit weight on a GPU, one flat buffer of bytes, without a header as layout.h:
//     set int32 [N4], bits uint32 [N][Kp / 32]
//     (W[n][k] >= 0) = bits[n][k / 32] >> (k % 32) & 1,   set[n] = sum_k (W[n][k] >= 0)
// N4 is N rounded up to 4, Kp is K rounded up to 128; the padding is zero.
#pragma once

#include "cuda/gemm/layout.h"

namespace qfx::cuda {

inline constexpr int64_t kBitMultiple = 128;  // 16 bytes

struct BitsLayout {
  int64_t n, k;

  int64_t words() const { return round_up(k, kBitMultiple) / 32; }
  int64_t pitch() const { return 4 * words(); }
  int64_t bits_at() const { return 4 * round_up(n, kColumnMultiple); }
  int64_t bytes() const { return bits_at() + n * pitch(); }
};

}  // namespace qfx::cuda
