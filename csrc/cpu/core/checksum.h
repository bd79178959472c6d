// sum_{r, l} (2 r + 1) (2 l + 1) word[r][l] mod 2^64 of rows of four 64-bit words. Every multiplier
// is odd, so a change within one word is never missed; of changes in several, one in 2^64. The sum
// of a part, for which its first row is an argument, is its share of the whole.
#pragma once

#include <cstdint>

namespace qfx::cpu {

inline constexpr int64_t kChecked = 32;  // bytes of a row

// Of `rows`, the first of which is row `first` of the whole.
uint64_t checksum(const void* words, int64_t rows, int64_t first = 0);

}  // namespace qfx::cpu
