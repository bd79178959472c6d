// AVX2 without VNNI: vpmaddubsw multiplies u8 x s8 and adds pairs in 16 bits, which saturates
// unless the codes are arranged so that no pair can reach 2^15. Three ways, each exact for its
// codes:
//   s8s8  a w = |a| (w ^ s) - min(a, 0),  s = -1 if a < 0 else 0: a pair of |a| (w ^ s) lies in
//         [-32768, 32512]. min(a, 0) does not depend on the column: `arrange` returns its sum.
//         Per group of 4 k: 4 bytes |a|, then 4 bytes of sign mask.
//   s8s7, s7s8  (a + offset) w, offset 128 or 64: a pair is at most 2 * 255 * 64 or 2 * 127 * 128.
//   s7s7  the same with offset 64, and two pairs, at most 4 * 127 * 64, are added in 16 bits.
#include <immintrin.h>

#include "cpu/offset.h"
#include "cpu/rows.h"

namespace qfx::cpu {
namespace {

inline __m256i broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

inline __m256i load(const int8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// 16-bit sums of pairs of products, of one row (a) and 8 columns of each of kDepth groups (w).
struct SignMask {
  static constexpr int kDepth = 1, kBytes = 2;
  __m256i size, sign;
  explicit SignMask(const uint8_t* a) : size(broadcast(a)), sign(broadcast(a + kGroup)) {}
  __m256i pairs(const int8_t* w) const {
    return _mm256_maddubs_epi16(size, _mm256_xor_si256(load(w), sign));
  }
};

struct Offset {
  static constexpr int kDepth = 1, kBytes = 1;
  __m256i code;
  explicit Offset(const uint8_t* a) : code(broadcast(a)) {}
  __m256i pairs(const int8_t* w) const { return _mm256_maddubs_epi16(code, load(w)); }
};

struct OffsetTwice {
  static constexpr int kDepth = 2, kBytes = 1;
  __m256i first, second;
  explicit OffsetTwice(const uint8_t* a) : first(broadcast(a)), second(broadcast(a + kGroup)) {}
  __m256i pairs(const int8_t* w) const {
    const __m256i next = _mm256_maddubs_epi16(second, load(w + kPanel * kGroup));
    return _mm256_add_epi16(_mm256_maddubs_epi16(first, load(w)), next);
  }
};

// kRows x 32 columns; every loop over the accumulators is unrolled, or GCC spills them.
template <class Operand, int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  constexpr int kVectors = kPanel / 8, kStep = Operand::kDepth * kPanel * kGroup;
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
  for (int64_t g = 0; g < groups; g += Operand::kDepth) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 4
      for (int i = 0; i < kStep; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(b + kAhead + i), _MM_HINT_T0);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Operand row(a + r * lda);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256i quads = _mm256_madd_epi16(row.pairs(b + v * 32), ones);
        acc[r][v] = _mm256_add_epi32(acc[r][v], quads);
      }
    }
    a += Operand::kDepth * kGroup * Operand::kBytes;
    b += kStep;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_si256(c + r * kVectors + v, acc[r][v]);
  }
}

int32_t arrange_signs_tail(const int8_t* q, int64_t from, int64_t k, int64_t padded_k, uint8_t* a) {
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

int32_t arrange_signs(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
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
  return static_cast<int32_t>(add) + arrange_signs_tail(q, i, k, padded_k, a);
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

template <class Operand, bool kPrefetch>
constexpr TileFn kTiles[] = {tile<Operand, 1, kPrefetch>, tile<Operand, 2, kPrefetch>,
                             tile<Operand, 3, kPrefetch>};

constexpr Format kWide = {.name = "s8s8",
                          .tile_rows = 2,
                          .bytes_per_code = SignMask::kBytes,
                          .k_multiple = 16,
                          .mul_offset = 0,
                          .tiles = kTiles<SignMask, false>,
                          .cold_tiles = kTiles<SignMask, true>,
                          .arrange = arrange_signs,
                          .multiply = multiply,
                          .minimum_rows = 0,
                          .below = nullptr};

template <class Operand, int kOffset>
constexpr Format offset_format(const char* name) {
  Format format = kWide;
  format.name = name;
  format.tile_rows = 3;
  format.bytes_per_code = Operand::kBytes;
  format.mul_offset = kOffset;
  format.tiles = kTiles<Operand, false>;
  format.cold_tiles = kTiles<Operand, true>;
  format.arrange = arrange_offset<kOffset>;
  return format;
}

constexpr Format kNarrowWeight = offset_format<Offset, 128>("s8s7");
constexpr Format kNarrowCodes = offset_format<Offset, 64>("s7s8");
constexpr Format kNarrow = offset_format<OffsetTwice, 64>("s7s7");

}  // namespace

const RowKernels& row_kernels_avx2() { return kRowKernels; }

const Kernels& kernels_avx2() {
  static constexpr Kernels kernels = {
      "avx2", &kRowKernels, {&kWide, &kNarrowWeight, &kNarrowCodes, &kNarrow}};
  return kernels;
}

}  // namespace qfx::cpu
