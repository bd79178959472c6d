// NEON with the dot product (ARMv8.2): sdot, 4 products s8 x s8 summed in 32 bits.
// Operand format: the codes themselves, zero padded.
#include "cpu/kernels/arm/tiles.h"
#include "cpu/kernels/rows/offset.h"

namespace qfx::cpu {
namespace {

struct Dot {
  static constexpr int kDepth = 4, kSums = 24;
  using Codes = int8x16_t;  // four groups
  using Sum = int32x4_t;

  static Codes codes(const uint8_t* a) { return vreinterpretq_s8_u8(vld1q_u8(a)); }
  static Sum add(Sum sum, int8x16_t w, Codes codes, int g) {
    if (g == 0) return vdotq_laneq_s32(sum, w, codes, 0);
    if (g == 1) return vdotq_laneq_s32(sum, w, codes, 1);
    if (g == 2) return vdotq_laneq_s32(sum, w, codes, 2);
    return vdotq_laneq_s32(sum, w, codes, 3);
  }
  static Sum from(int32x4_t sum) { return sum; }
  static int32x4_t total(Sum sum) { return sum; }
};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = kTallest<Dot>,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 0,
                            .tiles = kTiles<Dot, false>.data(),
                            .prefetching_tiles = kTiles<Dot, true>.data(),
                            .arrange = arrange_offset<0>};

}  // namespace

const Kernels& kernels_neondot() {
  const Kernels& neon = kernels_neon();
  static const Kernels kernels = {"neondot",   neon.row,
                                  neon.sums,   neon.attention,
                                  neon.lowbit, {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
