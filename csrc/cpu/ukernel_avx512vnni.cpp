// AVX-512 VNNI: vpdpbusd accumulates u8 x s8 products in 32 bits, so it never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/offset.h"
#include "cpu/rows.h"

namespace qfx::cpu {
namespace {

inline __m512i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// rows x 32 columns. 2 accumulators a row and depth step: up to 24 registers, 2 for the weights.
// Few rows take several steps at once, or the latency of vpdpbusd would bound them. Every loop over
// the accumulators is unrolled, or GCC spills them.
template <int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr int kSteps = kRows <= 2 ? 4 : kRows <= 5 ? 2 : 1;  // divides groups
  __m512i acc[kSteps][kRows][2];
#pragma GCC unroll 4
  for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const bool load = accumulate && s == 0;
      const int32_t* c = out + r * kPanel;
      acc[s][r][0] = load ? _mm512_loadu_si512(c) : _mm512_setzero_si512();
      acc[s][r][1] = load ? _mm512_loadu_si512(c + 16) : _mm512_setzero_si512();
    }
  }
  for (int64_t g = 0; g < groups; g += kSteps) {
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s, a += kGroup, b += kPanel * kGroup) {
      if constexpr (kPrefetch) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
        ahead += kPanel * kGroup;
      }
      const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const __m512i x = broadcast(a + r * lda);
        acc[s][r][0] = _mm512_dpbusd_epi32(acc[s][r][0], x, w0);
        acc[s][r][1] = _mm512_dpbusd_epi32(acc[s][r][1], x, w1);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int s = 1; s < kSteps; ++s) {
      acc[0][r][0] = _mm512_add_epi32(acc[0][r][0], acc[s][r][0]);
      acc[0][r][1] = _mm512_add_epi32(acc[0][r][1], acc[s][r][1]);
    }
    _mm512_storeu_si512(out + r * kPanel, acc[0][r][0]);
    _mm512_storeu_si512(out + r * kPanel + 16, acc[0][r][1]);
  }
}

// vpdpbusd in 16 independent chains.
int64_t multiply(int64_t rounds) {
  constexpr int kChains = 16;
  __m512i a = _mm512_set1_epi8(1), b = a;
  __m512i x[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) {
    x[i] = b;
    asm volatile("" : "+v"(x[i]));  // or the chains, being equal, would be merged
  }
  for (int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) x[i] = _mm512_dpbusd_epi32(x[i], a, b);
    asm volatile("" : "+v"(a));  // or the loop would be folded away
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) asm volatile("" ::"v"(x[i]));
  return rounds * kChains * 64;
}

constexpr TileFn kTiles[] = {tile<1, false>, tile<2, false>,  tile<3, false>,  tile<4, false>,
                             tile<5, false>, tile<6, false>,  tile<7, false>,  tile<8, false>,
                             tile<9, false>, tile<10, false>, tile<11, false>, tile<12, false>};
constexpr TileFn kPrefetchingTiles[] = {
    tile<1, true>, tile<2, true>, tile<3, true>, tile<4, true>,  tile<5, true>,  tile<6, true>,
    tile<7, true>, tile<8, true>, tile<9, true>, tile<10, true>, tile<11, true>, tile<12, true>};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = 12,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 128,
                            .tiles = kTiles,
                            .prefetching_tiles = kPrefetchingTiles,
                            .arrange = arrange_offset<128>,
                            .release = nullptr,
                            .multiply = multiply,
                            .minimum_rows = 0,
                            .below = nullptr};

}  // namespace

const RowKernels& row_kernels_avx512() { return kRowKernels; }

const Kernels& kernels_avx512vnni() {
  static constexpr Kernels kernels = {
      "avx512vnni", &kRowKernels, {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
