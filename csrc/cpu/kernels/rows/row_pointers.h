// Pointers into the rows of a tile that need few registers.
#pragma once

#include <cstdint>

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#define QFX_INLINE inline __attribute__((always_inline))

// One into each of kRows rows that lie `stride` elements apart. Every fourth row has a register of
// its own, as an address has a multiple of one register added: with one pointer and 11 multiples,
// more than there are registers, GCC keeps some of them in vector registers and moves them in each
// step.
template <typename T, int kRows>
class RowPointers {
 public:
  QFX_INLINE RowPointers(const T* first, int64_t stride) : stride_(stride), thrice_(3 * stride) {
#pragma GCC unroll 3
    for (int i = 0; i < kPointers; ++i) rows_[i] = first + 4 * i * stride;
    hide();
  }

  QFX_INLINE const T* of(int r) const {
    return rows_[r / 4] + (r % 4 == 3 ? thrice_ : r % 4 * stride_);
  }

  QFX_INLINE T at(int r, int k) const { return of(r)[k]; }

  QFX_INLINE void move(int64_t elements) {
#pragma GCC unroll 3
    for (int i = 0; i < kPointers; ++i) rows_[i] += elements;
    hide();
  }

  // What is read next is read again, not kept from before, and no other multiple of the stride is.
  QFX_INLINE void hide() {
    asm("" : "+r"(stride_), "+r"(thrice_));
#pragma GCC unroll 3
    for (int i = 0; i < kPointers; ++i) asm("" : "+r"(rows_[i]));
  }

 private:
  static constexpr int kPointers = (kRows + 3) / 4;
  const T* rows_[kPointers];
  int64_t stride_, thrice_;
};

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
