// AVX2 without VNNI: vpmaddubsw multiplies u8 x s8 and adds pairs in 16 bits, which saturates
// unless the codes are arranged so that no pair can reach 2^15. Three ways, each exact for its
// codes:
//   s8s8  a w = |a| (w ^ s) - min(a, 0),  s = -1 if a < 0 else 0: a pair of |a| (w ^ s) lies in
//         [-32768, 32512]. min(a, 0) does not depend on the column: `arrange` returns its sum.
//         Per group of 4 k: 4 bytes |a|, then 4 bytes of sign mask.
//   s8s7, s7s8  (a + offset) w, offset 128 or 64: a pair is at most 2 * 255 * 64 or 2 * 127 * 128.
//   s7s7  the same with offset 64, and two pairs, at most 4 * 127 * 64, are added in 16 bits.
#include <immintrin.h>

#include "cpu/kernels/rows/loops.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/x86/group_tiles256.h"
#include "cpu/kernels/x86/lowbit256.h"
#include "cpu/kernels/x86/multiply_chains.h"

namespace qfx::cpu {
namespace {

// Adds pairs of the 16-bit sums to acc.
inline __m256i add_pairs(__m256i acc, __m256i sums) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}

struct SignMask {
  static constexpr int kDepth = 1, kBytes = 2, kAccumulators = 8;
  __m256i size, sign;
  explicit SignMask(const uint8_t* a) : size(broadcast(a)), sign(broadcast(a + kGroup)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    return add_pairs(acc, _mm256_maddubs_epi16(size, _mm256_xor_si256(load(w), sign)));
  }
};

struct Offset {
  static constexpr int kDepth = 1, kBytes = 1, kAccumulators = 10;
  __m256i code;
  explicit Offset(const uint8_t* a) : code(broadcast(a)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    return add_pairs(acc, _mm256_maddubs_epi16(code, load(w)));
  }
};

struct OffsetTwice {
  static constexpr int kDepth = 2, kBytes = 1, kAccumulators = 8;
  __m256i first, second;
  explicit OffsetTwice(const uint8_t* a) : first(broadcast(a)), second(broadcast(a + kGroup)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    const __m256i next = _mm256_maddubs_epi16(second, load(w + kPanel * kGroup));
    return add_pairs(acc, _mm256_add_epi16(_mm256_maddubs_epi16(first, load(w)), next));
  }
};

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

// The two multiplies of the scheme, vpmaddubsw and vpmaddwd.
int64_t multiply(int64_t rounds) {
  const __m256i ones = _mm256_set1_epi16(1);
  const auto next = [&](__m256i x, __m256i a) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, x), ones);
  };
  return 32 * run_chains<10>(rounds, _mm256_set1_epi8(1), next);
}

constexpr Format kWide = {.name = "s8s8",
                          .tile_rows = kTallest<SignMask>,
                          .bytes_per_code = SignMask::kBytes,
                          .k_multiple = 16,
                          .mul_offset = 0,
                          .tiles = kTiles<SignMask, kNothing>.data(),
                          .prefetching_tiles = kTiles<SignMask, kT0>.data(),
                          .narrow_tiles = kNarrowTiles<SignMask>.data(),
                          .arrange = arrange_signs,
                          .multiply = multiply,
                          .few = few_tiles<SignMask>(),
                          .groups = &kGroups<SignMask>,
                          .tuning = {.ahead = 2048}};

template <class Operand, int kOffset>
constexpr Format offset_format(const char* name) {
  Format format = kWide;
  format.name = name;
  format.tile_rows = kTallest<Operand>;
  format.bytes_per_code = Operand::kBytes;
  format.mul_offset = kOffset;
  format.tiles = kTiles<Operand, kNothing>.data();
  format.prefetching_tiles = kTiles<Operand, kT0>.data();
  format.narrow_tiles = kNarrowTiles<Operand>.data();
  format.arrange = arrange_offset<kOffset>;
  format.few = few_tiles<Operand>();
  format.groups = &kGroups<Operand>;
  return format;
}

constexpr Format kNarrowWeight = offset_format<Offset, 128>("s8s7");
constexpr Format kNarrowCodes = offset_format<Offset, 64>("s7s8");
constexpr Format kNarrow = offset_format<OffsetTwice, 64>("s7s7");

// Two products u q lie in [-2 * 15 * 128, 2 * 15 * 127], or with 31 in place of 15: 8 such sums of
// 4 bits, and 4 of 5 bits, stay above -2^15. A line of 8 k adds two.
struct LowbitPairs {
  template <int kBits>
  static constexpr int kLines = kBits == 4 ? 4 : 2;
  static constexpr bool kUnsigned = false;
  static constexpr int kPairRows = 2;
  static __m256i add(__m256i sums, __m256i u, __m256i q) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(u, q));
    asm("" : "+x"(sums));  // or GCC adds them in another order, which needs all products at once
    return sums;
  }
  static __m256i close(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
};

constexpr LowbitKernels kLowbit =
    lowbit_kernels<LowbitTiles<LowbitPairs>>(unpack_group256<4>, unpack_group256<5>);

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels kernels = {
      "avx2",       &kRowKernels,
      &kSumKernels, &kAttentionKernels,
      &kLowbit,     {&kWide, &kNarrowWeight, &kNarrowCodes, &kNarrow}};
  return kernels;
}

}  // namespace qfx::cpu
