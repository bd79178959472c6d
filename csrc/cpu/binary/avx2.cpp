// AVX2 has no population count. It looks up popcount(w ^ x) of 4 bits of 32 columns with one
// vpshufb: a nibble of x chooses the table, nibbles of the weights are the indices. A table serves
// two rows of x at a time, in the low and the high half of its bytes:
//     table[x1][x0][w] = popcount(w ^ x0) + 16 popcount(w ^ x1)
// Three look-ups, at most 12 in each half, are added before the halves are separated.
//
// Operand format of a pair of rows: per 4 k the offset of the table, 16 bits, 16 x0 + 256 x1.
// The weights are spread into planes of nibbles, [8 groups][32] bytes, rounded up to 3 planes; in a
// plane, byte 16 h + 4 i + j is column 8 i + 4 h + j, which is what the unpacks below restore.
#include <immintrin.h>

#include "cpu/binary/kernels.h"

namespace qfx::cpu {
namespace {

constexpr int kNibbles = 8;     // in a group of 32 k
constexpr int kTogether = 3;    // look-ups added before the halves of their bytes are separated
constexpr int kFlush = 60;      // look-ups a byte can count: 4 each, and 60 is a multiple of 3
constexpr int64_t kBlock = 60;  // groups; a multiple of 3 nibbles; 15 KB of planes

struct Tables {
  uint8_t of[256][16];
};

constexpr Tables make_tables() {
  Tables tables = {};
  for (int x = 0; x < 256; ++x) {
    for (int w = 0; w < 16; ++w) {
      const int low = __builtin_popcount(w ^ (x & 15)), high = __builtin_popcount(w ^ (x >> 4));
      tables.of[x][w] = static_cast<uint8_t>(low + 16 * high);
    }
  }
  return tables;
}

alignas(64) constexpr Tables kTables = make_tables();

constexpr int64_t look_ups(int64_t groups) {
  return (groups * kNibbles + kTogether - 1) / kTogether * kTogether;
}

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

inline __m256i look_up(const uint8_t* a, const uint8_t* plane) {
  uint16_t offset;
  __builtin_memcpy(&offset, a, sizeof(offset));
  const uint8_t* table = &kTables.of[0][0] + offset;
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), load(plane));
}

// sums[0] counts the even bytes, sums[1] the odd ones.
inline void widen(__m256i bytes, uint16_t (*sums)[16]) {
  const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  store(sums[0], _mm256_add_epi16(load(sums[0]), even));
  store(sums[1], _mm256_add_epi16(load(sums[1]), _mm256_srli_epi16(bytes, 8)));
}

// Adds up to kFlush look-ups of each row to its sums; loops over the accumulators are unrolled.
template <int kPairs>
inline void count(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t planes,
                  uint16_t (*sums)[2][16]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i both[kPairs], high[kPairs];  // both = low + 16 high, modulo 256
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p) both[p] = high[p] = _mm256_setzero_si256();
  for (int64_t i = 0; i < planes; i += kTogether, a += 2 * kTogether, b += kTogether * kPanel) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const uint8_t* x = a + p * stride;
      const __m256i two = _mm256_add_epi8(look_up(x, b), look_up(x + 2, b + kPanel));
      const __m256i three = _mm256_add_epi8(two, look_up(x + 4, b + 2 * kPanel));
      both[p] = _mm256_add_epi8(both[p], three);
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(three, 4), nibble);
      high[p] = _mm256_add_epi8(high[p], upper);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_and_si256(high[p], nibble), 4);
    widen(_mm256_sub_epi8(both[p], shifted), sums[2 * p]);
    widen(high[p], sums[2 * p + 1]);
  }
}

inline void subtract_twice(__m256i sums, int32_t* out, bool accumulate) {
  const __m256i before = accumulate ? load(out) : _mm256_setzero_si256();
  store(out, _mm256_sub_epi32(before, _mm256_slli_epi32(sums, 1)));
}

inline void finish_row(const uint16_t (*sums)[16], int32_t* out, bool accumulate) {
  const __m256i zero = _mm256_setzero_si256(), even = load(sums[0]), odd = load(sums[1]);
  const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
  subtract_twice(_mm256_unpacklo_epi16(low, zero), out, accumulate);
  subtract_twice(_mm256_unpackhi_epi16(low, zero), out + 8, accumulate);
  subtract_twice(_mm256_unpacklo_epi16(high, zero), out + 16, accumulate);
  subtract_twice(_mm256_unpackhi_epi16(high, zero), out + 24, accumulate);
}

// pairs of rows x 32 columns
template <int kPairs>
void tile(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t groups, int32_t* out,
          bool accumulate) {
  alignas(32) uint16_t sums[2 * kPairs][2][16] = {};
  const int64_t planes = look_ups(groups);
  for (int64_t i = 0; i < planes; i += kFlush) {
    const int64_t here = planes - i < kFlush ? planes - i : kFlush;
    count<kPairs>(a + 2 * i, stride, b + i * kPanel, here, sums);
  }
  for (int r = 0; r < 2 * kPairs; ++r) finish_row(sums[r], out + r * kPanel, accumulate);
}

bool signs(const float* x, int64_t k, int64_t bytes, uint8_t* bits) {
  const __m256 zero = _mm256_setzero_ps();
  __m256 nan = zero;
  for (int64_t i = 0; i < 8 * bytes; i += 8) {
    float tail[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const float* from = x + i;
    _mm_prefetch(reinterpret_cast<const char*>(from) + kFetchAhead, _MM_HINT_T0);
    if (i + 8 > k) {
      for (int64_t j = i; j < k; ++j) tail[j - i] = x[j];
      from = tail;
    }
    const __m256 v = _mm256_loadu_ps(from);
    bits[i / 8] = static_cast<uint8_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, zero, _CMP_GE_OQ)));
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  return _mm256_movemask_ps(nan) != 0;
}

void arrange(const uint8_t* bits, int64_t groups, uint8_t* a) {
  const int64_t bytes = groups * kBitGroupBytes;
  for (int64_t i = 0; i < bytes; ++i, a += 4) {
    const uint32_t x0 = bits[i], x1 = bits[bytes + i];
    const uint32_t first = (x0 & 15) << 4 | (x1 & 15) << 8, second = (x0 & 240) | (x1 & 240) << 4;
    const uint32_t offsets = first | second << 16;
    __builtin_memcpy(a, &offsets, sizeof(offsets));
  }
  __builtin_memset(a, 0, 2 * (kTogether - 1));  // against planes of zeros: nothing
}

// One group of 32 columns into 8 planes.
inline void spread_group(const uint8_t* packed, uint8_t* b) {
  // The bytes of 4 columns: the first of each, the second of each...
  const __m256i by_byte = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i w[4], byte[4];
  for (int i = 0; i < 4; ++i) w[i] = _mm256_shuffle_epi8(load(packed + 32 * i), by_byte);
  const __m256i low01 = _mm256_unpacklo_epi32(w[0], w[1]),
                low23 = _mm256_unpacklo_epi32(w[2], w[3]);
  const __m256i high01 = _mm256_unpackhi_epi32(w[0], w[1]),
                high23 = _mm256_unpackhi_epi32(w[2], w[3]);
  byte[0] = _mm256_unpacklo_epi64(low01, low23), byte[1] = _mm256_unpackhi_epi64(low01, low23);
  byte[2] = _mm256_unpacklo_epi64(high01, high23), byte[3] = _mm256_unpackhi_epi64(high01, high23);
  for (int i = 0; i < 4; ++i) {
    store(b + 2 * i * kPanel, _mm256_and_si256(byte[i], nibble));
    store(b + (2 * i + 1) * kPanel, _mm256_and_si256(_mm256_srli_epi16(byte[i], 4), nibble));
  }
}

void spread(const uint8_t* packed, int64_t groups, uint8_t* b) {
  for (int64_t g = 0; g < groups; ++g, packed += kPanel * kBitGroupBytes, b += kNibbles * kPanel) {
    spread_group(packed, b);
  }
  __builtin_memset(b, 0, (look_ups(groups) - groups * kNibbles) * kPanel);
}

constexpr BinaryTileFn kTiles[] = {tile<1>, tile<2>, tile<3>};

}  // namespace

const BinaryKernels& binary_kernels_avx2() {
  static constexpr BinaryKernels kernels = {2,      3,     2 * kNibbles, kBlock, kNibbles,
                                            kTiles, signs, arrange,      spread};
  return kernels;
}

}  // namespace qfx::cpu
