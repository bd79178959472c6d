// AVX-VNNI: vpdpbusd on 256-bit registers, u8 x s8 summed in 32 bits, which never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/offset.h"
#include "cpu/tiles256.h"

namespace qfx::cpu {
namespace {

struct Offset {
  static constexpr int kDepth = 1, kBytes = 1, kAccumulators = 12;
  __m256i code;
  explicit Offset(const uint8_t* a) : code(broadcast(a)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    return _mm256_dpbusd_avx_epi32(acc, code, load(w));
  }
};

// vpdpbusd in 12 independent chains.
int64_t multiply(int64_t rounds) {
  constexpr int kChains = 12;
  __m256i a = _mm256_set1_epi8(1), b = a;
  __m256i x[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) {
    x[i] = b;
    asm volatile("" : "+x"(x[i]));  // or the chains, being equal, would be merged
  }
  for (int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) x[i] = _mm256_dpbusd_avx_epi32(x[i], a, b);
    asm volatile("" : "+x"(a));  // or the loop would be folded away
  }
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) asm volatile("" ::"x"(x[i]));
  return rounds * kChains * 32;
}

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = kTallest<Offset>,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 128,
                            .tiles = kTiles<Offset, false>.data(),
                            .prefetching_tiles = kTiles<Offset, true>.data(),
                            .arrange = arrange_offset<128>,
                            .release = nullptr,
                            .multiply = multiply,
                            .minimum_rows = 0,
                            .below = nullptr};

}  // namespace

const Kernels& kernels_avxvnni() {
  static const Kernels kernels = {
      "avxvnni", &row_kernels_avx2(), {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
