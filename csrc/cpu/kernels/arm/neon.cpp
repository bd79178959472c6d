// NEON, which every 64-bit ARM has: smull multiplies s8 x s8 into 16 bits, at most 2^14 each, and
// sadalp adds pairs of those to 32-bit sums, so nothing saturates.
// Operand format: the codes themselves, zero padded.
#include "cpu/kernels/arm/tiles.h"
#include "cpu/kernels/rows/loops.h"
#include "cpu/kernels/rows/offset.h"

namespace qfx::cpu {
namespace {

struct Widened {
  static constexpr int kDepth = 1, kSums = 12;
  using Codes = int8x16_t;  // one group, four times
  struct Sum {
    int32x4_t left, right;  // of 2 columns each, whose even and odd pairs of k are apart
  };

  static Codes codes(const uint8_t* a) {
    int32_t word;
    __builtin_memcpy(&word, a, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
  }
  static Sum add(Sum sum, int8x16_t w, Codes codes, int) {
    const int16x8_t left = vmull_s8(vget_low_s8(w), vget_low_s8(codes));
    return {vpadalq_s16(sum.left, left), vpadalq_s16(sum.right, vmull_high_s8(w, codes))};
  }
  static Sum from(int32x4_t sum) {
    const int32x4_t zero = vdupq_n_s32(0);
    return {vzip1q_s32(sum, zero), vzip2q_s32(sum, zero)};
  }
  static int32x4_t total(Sum sum) { return vpaddq_s32(sum.left, sum.right); }
};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = kTallest<Widened>,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 0,
                            .tiles = kTiles<Widened, false>.data(),
                            .prefetching_tiles = kTiles<Widened, true>.data(),
                            .arrange = arrange_offset<0>};

}  // namespace

const Kernels& kernels_neon() {
  static constexpr Kernels kernels = {"neon",          &kRowKernels,
                                      &kSumKernels,    &kAttentionKernels,
                                      &kLowbitKernels, {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
