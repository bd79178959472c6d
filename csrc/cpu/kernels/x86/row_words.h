// Words of 4 codes, of the rows of a tile.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/tables/panel.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#define QFX_INLINE inline __attribute__((always_inline))

// The next words of kRows rows that lie `stride` bytes apart. Every fourth row has a pointer of its
// own, as an address has a multiple of one register added: with one pointer and 11 multiples, more
// than there are registers, GCC keeps some of them in vector registers and moves them in each step.
template <int kRows>
class RowWords {
 public:
  QFX_INLINE RowWords(const uint8_t* a, int64_t stride) : stride_(stride), thrice_(3 * stride) {
#pragma GCC unroll 3
    for (int i = 0; i < kPointers; ++i) rows_[i] = a + 4 * i * stride;
    asm("" : "+r"(stride_), "+r"(thrice_));  // or GCC computes other multiples of it again
  }

  // Row r's, 16 times.
  QFX_INLINE __m512i of(int r) const {
    const int64_t offset = r % 4 == 3 ? thrice_ : r % 4 * stride_;
    int32_t word;
    __builtin_memcpy(&word, rows_[r / 4] + offset, sizeof(word));
    return _mm512_set1_epi32(word);
  }

  QFX_INLINE void next() {
#pragma GCC unroll 3
    for (int i = 0; i < kPointers; ++i) {
      rows_[i] += kGroup;
      asm("" : "+r"(rows_[i]));
    }
  }

 private:
  static constexpr int kPointers = (kRows + 3) / 4;
  const uint8_t* rows_[kPointers];
  int64_t stride_, thrice_;
};

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
