// The rows of attention between its two products: integer scores -> floats -> weights times the
// values' scales -> integer probabilities, and sums of the second product -> floats. The same bits
// on all instruction sets.
#pragma once

#include "cpu/kernels/tables/attention.h"
#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/kernels/rows/softmax_wide.h"
#else
#include "cpu/kernels/rows/softmax_plain.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// y = float(256 high + low) * factor, high and low as score_panel's integers.              (A6)
inline void mix_rows(const MixArgs* args) {
  uint32_t zero[kPanel];
  for (int n = 0; n < kPanel; ++n) {
    zero[n] = static_cast<uint32_t>(args->mul) * static_cast<uint32_t>(args->colsum[n]);
  }
  const int32_t* __restrict high = args->high, * __restrict low = args->low;
  float* __restrict out = args->out;
  for (int64_t r = 0; r < args->rows; ++r) {
    const uint32_t add_high = static_cast<uint32_t>(args->add_high[r]),
                   add_low = static_cast<uint32_t>(args->add_low[r]);
    const float factor = args->factor[r];
    for (int n = 0; n < kPanel; ++n) {
      const uint32_t h = static_cast<uint32_t>(high[n]) + add_high - zero[n];
      const uint32_t l = static_cast<uint32_t>(low[n]) + add_low - zero[n];
      const float sum = static_cast<float>(static_cast<int32_t>(h)) * 256.f +
                        static_cast<float>(static_cast<int32_t>(l));
      out[n] = sum * factor;
    }
    high += kPanel, low += kPanel, out += args->stride;
  }
}

}  // namespace
}  // namespace qfx::cpu
