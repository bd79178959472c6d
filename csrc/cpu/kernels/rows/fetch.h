// How x86 kernels fetch weights ahead of their use.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/tables/tuning.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int kNothing = -1;  // in place of a Hint: nothing is fetched

// GCC 12 takes a function that only prefetches for one without effects, and drops calls of it that
// it has not inlined yet; so it must do so at once.
#define QFX_INLINE inline __attribute__((always_inline))

template <int kHint>
QFX_INLINE void fetch(const void* line) {
  if constexpr (kHint == kT0) _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0);
  if constexpr (kHint == kT1) _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1);
  if constexpr (kHint == kNta) _mm_prefetch(static_cast<const char*>(line), _MM_HINT_NTA);
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
