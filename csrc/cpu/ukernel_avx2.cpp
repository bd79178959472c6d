// AVX2 without VNNI: the xor scheme, exact for all of s8 x s8.
//     a w = |a| (w ^ s) - min(a, 0),   s = -1 if a < 0 else 0
// |a| is unsigned and w ^ s signed, as vpmaddubsw wants them; a pair of products lies in
// [-32768, 32512], so its 16-bit sums never saturate. min(a, 0) does not depend on the column: its
// sum is the row constant that `arrange` returns.
// Operand format per group of 4 k: 4 bytes |q|, then 4 bytes of sign mask.
#include <immintrin.h>

#include "cpu/columns.h"
#include "cpu/rows.h"

namespace qfx::cpu {
namespace {

inline __m256i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// rows x 32 columns; every loop over the accumulators is unrolled, or GCC spills them.
template <int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  constexpr int kVectors = kPanel / 8;
  __m256i* c = reinterpret_cast<__m256i*>(out);
  __m256i acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = accumulate ? _mm256_loadu_si256(c + r * kVectors + v) : _mm256_setzero_si256();
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t g = 0; g < groups; ++g, a += 2 * kGroup, b += kPanel * kGroup) {
    if constexpr (kPrefetch) {
      _mm_prefetch(reinterpret_cast<const char*>(b + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(b + kAhead + 64), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i size = broadcast(a + r * lda), sign = broadcast(a + r * lda + kGroup);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + v);
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_xor_si256(w, sign));
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_si256(c + r * kVectors + v, acc[r][v]);
  }
}

int32_t arrange_tail(const int8_t* q, int64_t from, int64_t k, int64_t padded_k, uint8_t* a) {
  int32_t add = 0;
  for (int64_t i = from; i < padded_k; ++i) {
    const int32_t code = i < k ? q[i] : 0, size = code < 0 ? -code : code;
    uint8_t* group = a + i / kGroup * 2 * kGroup + i % kGroup;
    group[0] = static_cast<uint8_t>(size);
    group[kGroup] = code < 0 ? 0xff : 0;
    add += code < 0 ? size : 0;
  }
  return add;
}

int32_t arrange(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum = zero;
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + i));
    const __m256i size = _mm256_abs_epi8(code), sign = _mm256_cmpgt_epi8(zero, code);
    sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_and_si256(size, sign), zero));
    const __m256i low = _mm256_unpacklo_epi32(size, sign), high = _mm256_unpackhi_epi32(size, sign);
    __m256i* out = reinterpret_cast<__m256i*>(a + 2 * i);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  const int64_t add = _mm_extract_epi64(pair, 0) + _mm_extract_epi64(pair, 1);
  return static_cast<int32_t>(add) + arrange_tail(q, i, k, padded_k, a);
}

// The two multiplies of the scheme, vpmaddubsw and vpmaddwd, in 10 independent chains.
int64_t multiply(int64_t rounds) {
  constexpr int kChains = 10;
  __m256i a = _mm256_set1_epi8(1), b = a;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i x[kChains];
#pragma GCC unroll 10
  for (int i = 0; i < kChains; ++i) {
    x[i] = b;
    asm volatile("" : "+x"(x[i]));  // or the chains, being equal, would be merged
  }
  for (int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) x[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(a, x[i]), ones);
    asm volatile("" : "+x"(a));  // or the loop would be folded away
  }
#pragma GCC unroll 10
  for (int i = 0; i < kChains; ++i) asm volatile("" ::"x"(x[i]));
  return rounds * kChains * 32;
}

constexpr TileFn kTiles[] = {tile<1, false>, tile<2, false>};
constexpr TileFn kColdTiles[] = {tile<1, true>, tile<2, true>};

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels kernels = {"avx2",
                                      2,
                                      2,
                                      0,
                                      kTiles,
                                      kColdTiles,
                                      widen_row,
                                      range_of_row,
                                      quantize_row,
                                      quantize_clamped_row,
                                      random_groups,
                                      quantize_stochastic_row,
                                      range_of_columns,
                                      quantize_columns,
                                      arrange,
                                      epilogue,
                                      multiply};
  return kernels;
}

}  // namespace qfx::cpu
