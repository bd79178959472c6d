// AVX-512 with VPOPCNTDQ: xor, vpopcntd, add; three instructions per 512 products.
// Operand format: the bits, which a broadcast load hands to all columns.
#include <immintrin.h>

#include "cpu/binary/kernels.h"

namespace qfx::cpu {
namespace {

inline __m512i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

inline void subtract_twice(__m512i count, int32_t* out, bool accumulate) {
  asm("" : "+v"(count));  // or GCC moves the shift into the loop and spills there
  const __m512i before = accumulate ? _mm512_loadu_si512(out) : _mm512_setzero_si512();
  _mm512_storeu_si512(out, _mm512_sub_epi32(before, _mm512_slli_epi32(count, 1)));
}

// rows x 32 columns; every loop over the accumulators is unrolled, or GCC spills them.
template <int kRows>
void tile(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  __m512i count[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    count[r][0] = _mm512_setzero_si512();
    count[r][1] = _mm512_setzero_si512();
  }
  for (int64_t g = 0; g < groups; ++g, a += kBitGroupBytes, b += kPanel * kBitGroupBytes) {
    const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = broadcast(a + r * stride);
      const __m512i differ0 = _mm512_xor_si512(x, w0), differ1 = _mm512_xor_si512(x, w1);
      count[r][0] = _mm512_add_epi32(count[r][0], _mm512_popcnt_epi32(differ0));
      count[r][1] = _mm512_add_epi32(count[r][1], _mm512_popcnt_epi32(differ1));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    subtract_twice(count[r][0], out + r * kPanel, accumulate);
    subtract_twice(count[r][1], out + r * kPanel + 16, accumulate);
  }
}

bool signs(const float* x, int64_t k, int64_t bytes, uint8_t* bits) {
  const __m512 zero = _mm512_setzero_ps();
  __mmask16 nan = 0;
  for (int64_t i = 0; i < 8 * bytes; i += 16) {
    const int64_t left = k - i;
    const __mmask16 there = left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
    _mm_prefetch(reinterpret_cast<const char*>(x + i) + kFetchAhead, _MM_HINT_T0);
    const __m512 v = _mm512_maskz_loadu_ps(there, x + i);
    const uint16_t sign = _mm512_mask_cmp_ps_mask(there, v, zero, _CMP_GE_OQ);
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __builtin_memcpy(bits + i / 8, &sign, sizeof(sign));
  }
  return nan != 0;
}

void arrange(const uint8_t* bits, int64_t groups, uint8_t* a) {
  __builtin_memcpy(a, bits, groups * kBitGroupBytes);
}

constexpr BinaryTileFn kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                                   tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

}  // namespace

const BinaryKernels& binary_kernels_avx512() {
  static constexpr BinaryKernels kernels = {1,      12,    kBitGroupBytes, 128,    kBitGroupBytes,
                                            kTiles, signs, arrange,        nullptr};
  return kernels;
}

}  // namespace qfx::cpu
