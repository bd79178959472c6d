// The multiply instructions alone, from registers: the ceiling that benchmarks quote.
#pragma once

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// x[i] = next(x[i], a) in kChains independent chains, `rounds` times; how many steps that makes.
template <int kChains, class Vector, class Next>
inline int64_t run_chains(int64_t rounds, Vector a, const Next& next) {
  Vector x[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) {
    x[i] = a;
    asm volatile("" : "+v"(x[i]));  // or the chains, being equal, would be merged
  }
  for (int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) x[i] = next(x[i], a);
    asm volatile("" : "+v"(a));  // or the loop would be folded away
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) asm volatile("" ::"v"(x[i]));
  return rounds * kChains;
}

}  // namespace
}  // namespace qfx::cpu
