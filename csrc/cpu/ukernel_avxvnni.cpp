// AVX-VNNI: vpdpbusd on 256-bit registers, u8 x s8 summed in 32 bits, which never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/offset.h"

namespace qfx::cpu {
namespace {

inline __m256i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// kRows x 32 columns, at most 12 accumulators. One row takes several steps at once, or the latency
// of vpdpbusd would bound it. Every loop over the accumulators is unrolled, or GCC spills them.
template <int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  constexpr int kVectors = kPanel / 8, kSteps = kRows == 1 ? 2 : 1;  // divides groups
  __m256i* c = reinterpret_cast<__m256i*>(out);
  __m256i acc[kSteps][kRows][kVectors];
#pragma GCC unroll 2
  for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const bool load = accumulate && s == 0;
        acc[s][r][v] = load ? _mm256_loadu_si256(c + r * kVectors + v) : _mm256_setzero_si256();
      }
    }
  }
  for (int64_t g = 0; g < groups; g += kSteps) {
#pragma GCC unroll 2
    for (int s = 0; s < kSteps; ++s, a += kGroup, b += kPanel * kGroup) {
      if constexpr (kPrefetch) {
        _mm_prefetch(reinterpret_cast<const char*>(b + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(b + kAhead + 64), _MM_HINT_T0);
      }
      __m256i x[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) x[r] = broadcast(a + r * lda);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + v);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          acc[s][r][v] = _mm256_dpbusd_avx_epi32(acc[s][r][v], x[r], w);
        }
      }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __m256i sum = acc[0][r][v];
      if constexpr (kSteps == 2) sum = _mm256_add_epi32(sum, acc[1][r][v]);
      _mm256_storeu_si256(c + r * kVectors + v, sum);
    }
  }
}

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

constexpr TileFn kTiles[] = {tile<1, false>, tile<2, false>, tile<3, false>};
constexpr TileFn kColdTiles[] = {tile<1, true>, tile<2, true>, tile<3, true>};
constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = 3,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 128,
                            .tiles = kTiles,
                            .cold_tiles = kColdTiles,
                            .arrange = arrange_offset<128>,
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
