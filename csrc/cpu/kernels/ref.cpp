// Portable kernels, the definition the others are tested against.
// Operand format: the codes themselves, a[k] = q[k] as s8, zero padded.
#include "cpu/kernels/rows/loops.h"

namespace qfx::cpu {
namespace {

void tile_1x32(const uint8_t* a, int64_t, const int8_t* b, int64_t groups, const int8_t*,
               int32_t* tile, bool accumulate) {
  if (!accumulate) {
    for (int n = 0; n < kPanel; ++n) tile[n] = 0;
  }
  for (int64_t g = 0; g < groups; ++g, a += kGroup, b += kPanel * kGroup) {
    for (int n = 0; n < kPanel; ++n) {
      for (int i = 0; i < kGroup; ++i) {
        tile[n] += static_cast<int8_t>(a[i]) * b[n * kGroup + i];
      }
    }
  }
}

int32_t arrange(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  for (int64_t i = 0; i < padded_k; ++i) a[i] = i < k ? static_cast<uint8_t>(q[i]) : 0;
  return 0;
}

constexpr TileFn kTiles[] = {tile_1x32};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = 1,
                            .bytes_per_code = 1,
                            .k_multiple = kGroup,
                            .mul_offset = 0,
                            .tiles = kTiles,
                            .prefetching_tiles = kTiles,
                            .arrange = arrange};

}  // namespace

const Kernels& kernels_ref() {
  static constexpr Kernels kernels = {"ref",           &kRowKernels,
                                      &kSumKernels,    &kAttentionKernels,
                                      &kLowbitKernels, {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
