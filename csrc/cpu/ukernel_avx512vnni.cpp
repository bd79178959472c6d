// AVX-512 VNNI: vpdpbusd accumulates u8 x s8 products in 32 bits, so it never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/rows.h"

namespace qfx::cpu {
namespace {

inline __m512i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// rows x 32 columns, 2 accumulators a row: 24 registers for 12 rows, 2 for the weights.
template <int kRows>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  __m512i acc[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = accumulate ? _mm512_loadu_si512(out + r * kPanel) : _mm512_setzero_si512();
    acc[r][1] = accumulate ? _mm512_loadu_si512(out + r * kPanel + 16) : _mm512_setzero_si512();
  }
  for (int64_t g = 0; g < groups; ++g, a += kGroup, b += kPanel * kGroup) {
    const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = broadcast(a + r * lda);
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], x, w0);
      acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], x, w1);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_si512(out + r * kPanel, acc[r][0]);
    _mm512_storeu_si512(out + r * kPanel + 16, acc[r][1]);
  }
}

int32_t arrange(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  for (int64_t i = 0; i < k; ++i) a[i] = static_cast<uint8_t>(q[i]) ^ 0x80;
  for (int64_t i = k; i < padded_k; ++i) a[i] = 0;  // the weights are zero there
  return 0;
}

constexpr TileFn kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                             tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

}  // namespace

const Kernels& kernels_avx512vnni() {
  static constexpr Kernels kernels = {
      "avx512vnni", kMaxTileRows, 1,       128,     kTiles, widen_row,
      range_of_row, quantize_row, arrange, epilogue};
  return kernels;
}

}  // namespace qfx::cpu
