// Products of a few rows of 16 bits with the codes of a cache where they lie, by `vpmaddwd`: a code
// becomes 16 bits, and a row needs no bytes.
#pragma once

#include "cpu/kernels/rows/cache_panels.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kWordRows = 4;  // whose sums stay in registers

// Runs what is compiled for so many rows, four at most.
template <typename F>
inline void by_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

inline __m256i add_products(__m256i sum, __m256i pairs, const uint8_t* row) {
  int32_t pair;
  __builtin_memcpy(&pair, row, sizeof(pair));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi32(pair)));
}

struct Pairs {
  __m256i first, second;  // of 8 columns each
};

// Two rows of 16 codes -> a pair of 16 bits of each column.
inline Pairs pairs_of(__m128i a, __m128i b) {
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)),
          _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}

inline __m128i load_bytes(const uint8_t* from, int64_t count) {
  if (count == kTokens) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  uint8_t rest[kTokens] = {};
  __builtin_memcpy(rest, from, count);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rest));
}

// Two features of 16 keys; in 4 bits the halves of a row of bytes.
template <int kBits>
inline Pairs pairs_of_keys(const uint8_t* codes, bool both) {
  const __m128i a = load_bytes(codes, kTokens);
  if constexpr (kBits == 8) {
    return pairs_of(a, both ? load_bytes(codes + kTokens, kTokens) : _mm_setzero_si128());
  }
  const __m128i nibble = _mm_set1_epi8(15);
  return pairs_of(_mm_and_si128(a, nibble), _mm_and_si128(_mm_srli_epi16(a, 4), nibble));
}

// Two rows of sums whose 256 high + low are these: what there is for bytes.
inline void put_halves(__m256i sums, int32_t* high, int32_t* low) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm256_srai_epi32(sums, 8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low),
                      _mm256_and_si256(sums, _mm256_set1_epi32(255)));
}

template <int kRows, int kBits>
inline void words_by_keys(const CacheFewArgs& args, const uint8_t* codes, int64_t row,
                          int32_t* out) {
  __m256i s[kRows][2] = {};
  const uint8_t* a = args.a + row * args.lda;
  for (int64_t i = 0; i < args.features; i += 2, a += 4, codes += kTokens * kBits / 4) {
    fetch_ahead(codes);
    const Pairs pairs = pairs_of_keys<kBits>(codes, i + 1 < args.features);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      s[r][0] = add_products(s[r][0], pairs.first, a + r * args.lda);
      s[r][1] = add_products(s[r][1], pairs.second, a + r * args.lda);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    int32_t *high = out + (row + r) * kPanel, *low = high + args.rows / kBytes * kPanel;
    put_halves(s[r][0], high, low);
    put_halves(s[r][1], high + 8, low + 8);
  }
}

inline void few_keys(const CacheFewArgs* args) {
  const int64_t words = args->rows / kBytes;
  for (int64_t i = 0; i < args->count; ++i) {
    int32_t* out = args->out + i / 2 * args->rows * kPanel + i % 2 * kTokens;
    const uint8_t* codes = args->blocks[i];
    if (codes == nullptr) {
      for (int64_t r = 0; r < args->rows; ++r) {
        __builtin_memset(out + r * kPanel, 0, kTokens * sizeof(int32_t));
      }
      continue;
    }
    for (int64_t r = 0; r < words; r += kWordRows) {
      by_rows(words - r, [&]<int kRows>() {
        args->bits == 8 ? words_by_keys<kRows, 8>(*args, codes, r, out)
                        : words_by_keys<kRows, 4>(*args, codes, r, out);
      });
    }
  }
}

// 16 values of a token, of `count` bytes; in 4 bits their lower or upper halves.
template <int kBits>
inline __m128i codes_of_values(const uint8_t* codes, int64_t count, bool upper) {
  const __m128i x = load_bytes(codes, count);
  if constexpr (kBits == 8) return x;
  return _mm_and_si128(upper ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
}

// Sums of up to four rows and, in the last row, of the codes.
template <int kRows>
using ValueSums = int32_t[kRows + 1][kMostWords + kTokens];

// Adds rows row, row + 1, ... times 16 features of the 16 tokens of a block, which lie at `codes`,
// to the sums from e on.
template <int kRows, int kBits>
inline void words_by_values(const CacheFewArgs& args, const uint8_t* a, const uint8_t* codes,
                            int64_t count, bool upper, int64_t e, ValueSums<kRows>& sums) {
  const int64_t bytes = args.features * kBits / 8;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i s[kRows + 1][2];
#pragma GCC unroll 5
  for (int r = 0; r <= kRows; ++r) __builtin_memcpy(s[r], sums[r] + e, sizeof(s[r]));
  for (int n = 0; n < kTokens; n += 2, codes += 2 * bytes, a += 4) {
    const Pairs pairs = pairs_of(codes_of_values<kBits>(codes, count, upper),
                                 codes_of_values<kBits>(codes + bytes, count, upper));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      s[r][0] = add_products(s[r][0], pairs.first, a + r * args.lda);
      s[r][1] = add_products(s[r][1], pairs.second, a + r * args.lda);
    }
    s[kRows][0] = _mm256_add_epi32(s[kRows][0], _mm256_madd_epi16(pairs.first, ones));
    s[kRows][1] = _mm256_add_epi32(s[kRows][1], _mm256_madd_epi16(pairs.second, ones));
  }
#pragma GCC unroll 5
  for (int r = 0; r <= kRows; ++r) __builtin_memcpy(sums[r] + e, s[r], sizeof(s[r]));
}

// The sums of P - 2^15, to which 2^15 times those of the codes are added, as 256 high + low.
inline void put_words(const CacheFewArgs& args, int64_t word, const int32_t* sums,
                      const int32_t* colsum) {
  for (int64_t e = 0; e < args.features; e += kPanel) {
    int32_t* __restrict high = args.out + (e / kPanel * args.rows + word) * kPanel;
    int32_t* __restrict low = high + args.rows / kBytes * kPanel;
    const int64_t count = args.features - e < kPanel ? args.features - e : kPanel;
    for (int64_t i = 0; i < count; ++i) {
      high[i] = 128 * colsum[e + i] + (sums[e + i] >> 8);
      low[i] = sums[e + i] & 255;
    }
  }
}

template <int kRows, int kBits>
inline void few_values_of(const CacheFewArgs& args, int64_t row) {
  const int64_t bytes = args.features * kBits / 8;
  alignas(32) ValueSums<kRows> sums;
  for (auto& each : sums) __builtin_memset(each, 0, (args.features + kTokens) * sizeof(int32_t));
  for (int64_t i = 0; i < args.count; ++i) {
    const uint8_t *codes = args.blocks[i], *a = args.a + row * args.lda + 2 * i * kTokens;
    if (codes == nullptr) continue;
    for (int64_t at = 0; at < kTokens * bytes; at += 64) fetch_ahead(codes + at);
    for (int64_t first = 0; first < bytes; first += kTokens) {
      const int64_t count = bytes - first < kTokens ? bytes - first : kTokens;
      for (int half = 0; half < (kBits == 8 ? 1 : 2); ++half) {
        words_by_values<kRows, kBits>(args, a, codes + first, count, half == 1,
                                      half * bytes + first, sums);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) put_words(args, row + r, sums[r], sums[kRows]);
}

inline void few_values(const CacheFewArgs* args) {
  const int64_t words = args->rows / kBytes;
  for (int64_t r = 0; r < words; r += kWordRows) {
    by_rows(words - r, [&]<int kRows>() {
      args->bits == 8 ? few_values_of<kRows, 8>(*args, r) : few_values_of<kRows, 4>(*args, r);
    });
  }
}
#endif

}  // namespace
}  // namespace qfx::cpu
