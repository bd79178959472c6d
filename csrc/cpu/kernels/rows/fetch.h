// How x86 kernels fetch weights ahead of their use.
#pragma once

#include <immintrin.h>

namespace qfx::cpu {

// One row reads each weight once: past the second-level cache, where what runs between two calls,
// and the keys and values of attention, then stay. Several rows read a weight again.
template <int kRows>
inline constexpr _mm_hint kFetch = kRows == 1 ? _MM_HINT_NTA : _MM_HINT_T0;

}  // namespace qfx::cpu
