// Products of a few rows with the codes of a cache where they lie: nothing is unpacked, and memory
// is read all the time. For rows of unsigned bytes, code + 128.
#pragma once

#include "cpu/kernels/rows/cache_panels.h"
#include "cpu/kernels/rows/cache_words.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#if defined(__AVX512VNNI__)
// Runs what is compiled for so many rows: two, which are the bytes of one, to eight.
template <typename F>
inline void by_bytes(int64_t rows, const F& f) {
  switch (rows) {
    case 2:
      return f.template operator()<2>();
    case 4:
      return f.template operator()<4>();
    case 6:
      return f.template operator()<6>();
    default:
      return f.template operator()<8>();
  }
}

// The word of a row of unsigned bytes in all lanes.
inline __m512i word_in_all(const uint8_t* a) {
  int32_t word;
  __builtin_memcpy(&word, a, sizeof(word));
  return _mm512_set1_epi32(word);
}

// A word of four features of each of 16 keys.
template <int kBits>
inline __m512i words_of_keys(const uint8_t* codes) {
  if constexpr (kBits == 8) return words_of_columns(_mm512_loadu_si512(codes));
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + 1);
  const __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
  __m512i x = _mm512_cvtepu16_epi32(pairs);
  x = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 8)), _mm512_set1_epi32(0x00ff00ff));
  return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 4)),
                          _mm512_set1_epi32(0x0f0f0f0f));
}

template <int kRows, int kBits>
inline void few_keys_of_block(const CacheFewArgs& args, const uint8_t* codes, int32_t* out,
                              int32_t* sums) {
  constexpr int64_t kStep = kGroup * kTokens * kBits / 8;
  __m512i sum = _mm512_setzero_si512(), s[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) s[r] = sum;
  const uint8_t* a = args.a;
  const auto add = [&](const uint8_t* from) {
    const __m512i words = words_of_keys<kBits>(from);
    sum = add_bytes(sum, words);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      s[r] = _mm512_dpbusd_epi32(s[r], word_in_all(a + r * args.lda), words);
    }
    a += kGroup;
  };
  int64_t i = 0;
  for (; i + kGroup <= args.features; i += kGroup, codes += kStep) {
    fetch_ahead(codes);
    add(codes);
  }
  if (i < args.features) {
    uint8_t rest[kStep] = {};
    __builtin_memcpy(rest, codes, (args.features - i) * kTokens * kBits / 8);
    add(rest);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) _mm512_storeu_si512(out + r * kPanel, s[r]);
  _mm512_storeu_si512(sums, sum);
}

// out[block / 2][rows][32] and sums[16 block].
inline void few_keys(const CacheFewArgs* args) {
  for (int64_t i = 0; i < args->count; ++i) {
    int32_t* out = args->out + i / 2 * args->rows * kPanel + i % 2 * kTokens;
    int32_t* sums = args->sums + i * kTokens;
    const uint8_t* codes = args->blocks[i];
    if (codes == nullptr) {
      for (int64_t r = 0; r < args->rows; ++r) __builtin_memset(out + r * kPanel, 0, 64);
      __builtin_memset(sums, 0, 64);
      continue;
    }
    by_bytes(args->rows, [&]<int kRows>() {
      args->bits == 8 ? few_keys_of_block<kRows, 8>(*args, codes, out, sums)
                      : few_keys_of_block<kRows, 4>(*args, codes, out, sums);
    });
  }
}

// 64 codes of a token: of 64 bytes, or the halves of 32. `there` says which bytes there are.
template <int kBits>
inline __m512i codes_of_token(const uint8_t* codes, __mmask64 there) {
  fetch_ahead(codes);
  if constexpr (kBits == 8) return _mm512_maskz_loadu_epi8(there, codes);
  const __m256i x = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(there), codes);
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(x), _mm256_srli_epi16(x, 4), 1);
  return _mm512_and_si512(both, _mm512_set1_epi8(15));
}

// Where the sum of row r and feature e goes.
inline int32_t* sum_at(const CacheFewArgs& args, int64_t r, int64_t e) {
  return args.out + (e / kPanel * args.rows + r) * kPanel + e % kPanel;
}

template <int kLane>
inline void put_lane(__m512i sums, int32_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_extracti32x4_epi32(sums, kLane));
}

// Two lanes of each vector, codes 16 l + 4 j, as the sums of 32 features.
template <int kLane>
inline void put_panel(const __m512i* s, int32_t* to) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    put_lane<kLane>(s[j], to + 4 * j);
    put_lane<kLane + 1>(s[j], to + 16 + 4 * j);
  }
}

// Sums of 64 codes, which lie as the unpacking leaves them: of lane l of s[j] codes 16 l + 4 j.
template <int kBits>
inline void put_sums(const CacheFewArgs& args, const __m512i* s, int64_t r, int64_t first,
                     int64_t count) {
  const int64_t half = args.features / 2;
  if (kBits == 8 || (count == kPanel && half % kPanel == 0)) {
    const int64_t second = kBits == 8 ? first + kPanel : half + first;
    put_panel<0>(s, sum_at(args, r, first));
    if (second < args.features) put_panel<2>(s, sum_at(args, r, second));
    return;
  }
  alignas(64) int32_t sums[2 * kPanel];
  put_panel<0>(s, sums);
  put_panel<2>(s, sums + kPanel);
  for (int i = 0; i < count; ++i) {
    *sum_at(args, r, first + i) = sums[i];
    *sum_at(args, r, half + first + i) = sums[kPanel + i];
  }
}

// Rows r, r + 1, ... with `count` bytes of each token, from `first` on.
template <int kRows, int kBits>
inline void few_values_of_bytes(const CacheFewArgs& args, int64_t row, int64_t first,
                                int64_t count) {
  const int64_t bytes = args.features * kBits / 8;
  const __mmask64 there = count == 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
  __m512i s[kRows][4];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 4; ++j) s[r][j] = _mm512_setzero_si512();
  }
  for (int64_t i = 0; i < args.count; ++i) {
    if (args.blocks[i] == nullptr) continue;
    const uint8_t* codes = args.blocks[i] + first;
    const uint8_t* a = args.a + row * args.lda + i * kTokens;
    for (int n = 0; n < kTokens; n += kGroup, codes += kGroup * bytes, a += kGroup) {
      const __m512i t0 = codes_of_token<kBits>(codes, there);
      const __m512i t1 = codes_of_token<kBits>(codes + bytes, there);
      const __m512i t2 = codes_of_token<kBits>(codes + 2 * bytes, there);
      const __m512i t3 = codes_of_token<kBits>(codes + 3 * bytes, there);
      const __m512i low = _mm512_unpacklo_epi8(t0, t1), high = _mm512_unpackhi_epi8(t0, t1);
      const __m512i low2 = _mm512_unpacklo_epi8(t2, t3), high2 = _mm512_unpackhi_epi8(t2, t3);
      const __m512i words[4] = {_mm512_unpacklo_epi16(low, low2), _mm512_unpackhi_epi16(low, low2),
                                _mm512_unpacklo_epi16(high, high2),
                                _mm512_unpackhi_epi16(high, high2)};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512i u = word_in_all(a + r * args.lda);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) s[r][j] = _mm512_dpbusd_epi32(s[r][j], u, words[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) put_sums<kBits>(args, s[r], row + r, first, count);
}

template <int kBits>
inline void few_values_of(const CacheFewArgs& args) {
  constexpr int64_t kBytes = kBits == 8 ? 64 : 32;
  const int64_t bytes = args.features * kBits / 8;
  for (int64_t first = 0; first < bytes; first += kBytes) {
    const int64_t count = bytes - first < kBytes ? bytes - first : kBytes;
    for (int64_t r = 0; r < args.rows; r += 4) {  // whose sums there is room for
      args.rows - r == 2 ? few_values_of_bytes<2, kBits>(args, r, first, count)
                         : few_values_of_bytes<4, kBits>(args, r, first, count);
    }
  }
}

// out[e / 32][rows][32].
inline void few_values(const CacheFewArgs* args) {
  args->bits == 8 ? few_values_of<8>(*args) : few_values_of<4>(*args);
}

constexpr CacheFewKernels kCacheFew = {.rows = 8, .keys = few_keys, .values = few_values};
#elif defined(__AVX2__)
constexpr CacheFewKernels kCacheFew = {
    .rows = 16, .words = true, .keys = few_keys, .values = few_values};
#else
constexpr CacheFewKernels kCacheFew = {};
#endif

}  // namespace
}  // namespace qfx::cpu
