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

// The row of sums of a row of words, of which the last half are 256 m + l: there the third bytes'.
inline int64_t plane_row(const CacheFewArgs& args, int64_t word) {
  const int64_t rows = args.rows / kBytes;
  return word < rows ? word : rows + word;
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
    __m256i* to = reinterpret_cast<__m256i*>(out + plane_row(args, row + r) * kPanel);
    _mm256_storeu_si256(to, s[r][0]);
    _mm256_storeu_si256(to + 1, s[r][1]);
  }
}

// The sums of h, zeros, and the sums of 256 m + l.
inline void few_keys(const CacheFewArgs* args) {
  const int64_t words = 2 * args->rows / kBytes;
  for (int64_t i = 0; i < args->count; ++i) {
    int32_t* out = args->out + i / 2 * args->rows * kPanel + i % 2 * kTokens;
    const uint8_t* codes = args->blocks[i];
    for (int64_t r = 0; r < args->rows; ++r) {
      __builtin_memset(out + r * kPanel, 0, kTokens * sizeof(int32_t));
    }
    for (int64_t r = 0; r < words && codes != nullptr; r += kWordRows) {
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

// s[r] += rows r, r + 1, ... times 16 features of the 16 tokens of a block, and colsum the codes.
template <int kRows, int kBits>
inline void words_by_values(const CacheFewArgs& args, int64_t block, int64_t row, int64_t first,
                            int64_t count, bool upper, int32_t (*sums)[kTokens], int32_t* colsum) {
  const int64_t bytes = args.features * kBits / 8;
  const uint8_t* codes = args.blocks[block] + first;
  const uint8_t* a = args.a + row * args.lda + 2 * block * kTokens;
  __m256i s[kRows][2], c[2];
  __builtin_memcpy(s, sums, sizeof(s));
  __builtin_memcpy(c, colsum, sizeof(c));
  const __m256i ones = _mm256_set1_epi16(1);
  for (int n = 0; n < kTokens; n += 2, codes += 2 * bytes, a += 4) {
    fetch_ahead(codes);
    const Pairs pairs = pairs_of(codes_of_values<kBits>(codes, count, upper),
                                 codes_of_values<kBits>(codes + bytes, count, upper));
    c[0] = _mm256_add_epi32(c[0], _mm256_madd_epi16(pairs.first, ones));
    c[1] = _mm256_add_epi32(c[1], _mm256_madd_epi16(pairs.second, ones));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      s[r][0] = add_products(s[r][0], pairs.first, a + r * args.lda);
      s[r][1] = add_products(s[r][1], pairs.second, a + r * args.lda);
    }
  }
  __builtin_memcpy(sums, s, sizeof(s));
  __builtin_memcpy(colsum, c, sizeof(c));
}

// Sums of h, or those of (256 m + l - 2^15) c plus 2^15 times those of c, as 256 M + L.
inline void put_words(const CacheFewArgs& args, int64_t word, int64_t first, int64_t count,
                      const int32_t* sums, const int32_t* colsum) {
  const int64_t rows = args.rows / kBytes;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t e = first + i;
    int32_t* out = args.out + (e / kPanel * args.rows + word) * kPanel + e % kPanel;
    if (word < rows) {
      *out = sums[i];
    } else {
      *out = 128 * colsum[i] + (sums[i] >> 8);
      out[rows * kPanel] = sums[i] & 255;
    }
  }
}

template <int kRows, int kBits>
inline void few_values_of(const CacheFewArgs& args, int64_t row) {
  const int64_t bytes = args.features * kBits / 8;
  for (int64_t first = 0; first < bytes; first += kTokens) {
    const int64_t count = bytes - first < kTokens ? bytes - first : kTokens;
    for (int half = 0; half < (kBits == 8 ? 1 : 2); ++half) {
      alignas(32) int32_t sums[kRows][kTokens] = {}, colsum[kTokens] = {};
      for (int64_t i = 0; i < args.count; ++i) {
        if (args.blocks[i] == nullptr) continue;
        words_by_values<kRows, kBits>(args, i, row, first, count, half == 1, sums, colsum);
      }
      for (int r = 0; r < kRows; ++r) {
        put_words(args, row + r, half * bytes + first, count, sums[r], colsum);
      }
    }
  }
}

inline void few_values(const CacheFewArgs* args) {
  const int64_t words = 2 * args->rows / kBytes;
  for (int64_t r = 0; r < words; r += kWordRows) {
    by_rows(words - r, [&]<int kRows>() {
      args->bits == 8 ? few_values_of<kRows, 8>(*args, r) : few_values_of<kRows, 4>(*args, r);
    });
  }
}
#endif

}  // namespace
}  // namespace qfx::cpu
