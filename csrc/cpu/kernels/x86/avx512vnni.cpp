// AVX-512 VNNI: vpdpbusd accumulates u8 x s8 products in 32 bits, so it never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/loops.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/x86/multiply_chains.h"

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
        _mm_prefetch(reinterpret_cast<const char*>(ahead), kFetch<kRows>);
        _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), kFetch<kRows>);
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

int64_t multiply(int64_t rounds) {
  const __m512i b = _mm512_set1_epi8(1);
  const auto next = [&](__m512i x, __m512i a) { return _mm512_dpbusd_epi32(x, a, b); };
  return 64 * run_chains<16>(rounds, b, next);
}

template <bool kPrefetch>
constexpr TileFn kTiles[] = {tile<1, kPrefetch>,  tile<2, kPrefetch>,  tile<3, kPrefetch>,
                             tile<4, kPrefetch>,  tile<5, kPrefetch>,  tile<6, kPrefetch>,
                             tile<7, kPrefetch>,  tile<8, kPrefetch>,  tile<9, kPrefetch>,
                             tile<10, kPrefetch>, tile<11, kPrefetch>, tile<12, kPrefetch>};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = 12,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 128,
                            .tiles = kTiles<false>,
                            .prefetching_tiles = kTiles<true>,
                            .arrange = arrange_offset<128>,
                            .multiply = multiply};

}  // namespace

const Kernels& kernels_avx512vnni() {
  static constexpr Kernels kernels = {"avx512vnni",
                                      &kRowKernels,
                                      &kSumKernels,
                                      &kAttentionKernels,
                                      {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
