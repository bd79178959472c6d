// The signs of R's stages. (R1)
#pragma once

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// Whether stage h takes the partner off: h is bit 0 or bit 1 of a digit of i in base 4, on whose
// two bits the sign depends. Stages back are those of the transpose.
template <bool kBack>
constexpr bool takes_off(int i, int h) {
  constexpr int kLowBits = 0x55;
  const int at = kBack ? i ^ h : i;
  return (h & kLowBits) != 0 ? ((at & h) != 0) != ((at & 2 * h) != 0) : (at & h) != 0;
}

constexpr double inverse_root(int block) {
  if (block == 1) return 1;
  return block == 2 ? 0.70710678118654752440 : inverse_root(block / 4) / 2;
}

template <int kBlock>
constexpr float kInverseRoot = static_cast<float>(inverse_root(kBlock));

}  // namespace
}  // namespace qfx::cpu
