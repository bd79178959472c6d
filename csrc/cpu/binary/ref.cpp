// Portable 1-bit kernels, the definition the others are tested against. Operand format: the bits.
#include "cpu/binary/kernels.h"

namespace qfx::cpu {
namespace {

uint32_t word(const uint8_t* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}

void tile_1x32(const uint8_t* a, int64_t, const uint8_t* b, int64_t groups, int32_t* out,
               bool accumulate) {
  for (int n = 0; n < kPanel; ++n) {
    int32_t count = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t differ =
          word(a + g * kBitGroupBytes) ^ word(b + (g * kPanel + n) * kBitGroupBytes);
      count += __builtin_popcount(differ);
    }
    out[n] = (accumulate ? out[n] : 0) - 2 * count;
  }
}

bool signs(const float* x, int64_t k, int64_t bytes, uint8_t* bits) {
  for (int64_t i = 0; i < bytes; ++i) bits[i] = 0;
  bool nan = false;
  for (int64_t i = 0; i < k; ++i) {
    bits[i / 8] |= static_cast<uint8_t>((x[i] >= 0) << i % 8);
    nan |= x[i] != x[i];
  }
  return nan;
}

void arrange(const uint8_t* bits, int64_t groups, uint8_t* a) {
  __builtin_memcpy(a, bits, groups * kBitGroupBytes);
}

constexpr BinaryTileFn kTiles[] = {tile_1x32};

}  // namespace

const BinaryKernels& binary_kernels_ref() {
  static constexpr BinaryKernels kernels = {1,      1,     kBitGroupBytes, 128,    kBitGroupBytes,
                                            kTiles, signs, arrange,        nullptr};
  return kernels;
}

}  // namespace qfx::cpu
