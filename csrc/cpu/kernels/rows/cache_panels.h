// Codes of a cache -> panels as pack.h says, a quad of 64 tokens at a time.
#pragma once

#include "cpu/kernels/rows/interleave.h"
#include "cpu/kernels/tables/cache.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// The prefetch distance is 8192 bytes, into the second cache: with 4096 bytes, into the first,
// reading from memory took a tenth longer on a Xeon with AMX.
inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* codes) {
  constexpr int64_t kAhead = 8192;
  constexpr int kToRead = 0, kSecondCache = 2;
  __builtin_prefetch(codes + kAhead, kToRead, kSecondCache);
}

// Four features of 16 keys, or as many as there are, [4][16] -> a word of each key.
inline void words_of_bytes(const uint8_t* codes, uint32_t* words) {
#if defined(__AVX512VNNI__)
  _mm512_storeu_si512(words, words_of_columns(_mm512_loadu_si512(codes)));
#elif defined(__AVX2__)
  const auto row = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i * kTokens));
  };
  const __m128i low = _mm_unpacklo_epi8(row(0), row(1)), low2 = _mm_unpacklo_epi8(row(2), row(3));
  const __m128i high = _mm_unpackhi_epi8(row(0), row(1)), high2 = _mm_unpackhi_epi8(row(2), row(3));
  __m128i* to = reinterpret_cast<__m128i*>(words);
  _mm_storeu_si128(to, _mm_unpacklo_epi16(low, low2));
  _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(low, low2));
  _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(high, high2));
  _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(high, high2));
#else
  for (int n = 0; n < kTokens; ++n) {
    words[n] = static_cast<uint32_t>(codes[n]) | static_cast<uint32_t>(codes[kTokens + n]) << 8 |
               static_cast<uint32_t>(codes[2 * kTokens + n]) << 16 |
               static_cast<uint32_t>(codes[3 * kTokens + n]) << 24;
  }
#endif
}

// The same of two rows of bytes, each of which holds two features in its halves.
inline void words_of_halves(const uint8_t* codes, uint32_t* words) {
  for (int n = 0; n < kTokens; ++n) {
    uint32_t x = static_cast<uint32_t>(codes[n]) | static_cast<uint32_t>(codes[kTokens + n]) << 8;
    x = (x | x << 8) & 0x00ff00ff;
    words[n] = (x | x << 4) & 0x0f0f0f0f;
  }
}

// The sums of the codes of 16 keys.
struct KeySums {
#if defined(__AVX512VNNI__)
  __m512i sums = _mm512_setzero_si512();

  void add(const uint32_t* words) { sums = add_bytes(sums, _mm512_load_si512(words)); }
  void store(int32_t* to) const { _mm512_storeu_si512(to, sums); }
#else
  int32_t sums[kTokens] = {};

  void add(const uint32_t* words) {
    for (int n = 0; n < kTokens; ++n) sums[n] += sum_of_bytes(words[n]);
  }
  void store(int32_t* to) const { __builtin_memcpy(to, sums, sizeof(sums)); }
#endif
};

// A block of 16 keys into its half of a panel.
template <int kBits>
inline void keys_of_panel(const uint8_t* codes, int64_t features, int8_t* out, int32_t* sums) {
  constexpr int64_t kStep = kGroup * kTokens * kBits / 8;
  constexpr auto kWords = kBits == 8 ? words_of_bytes : words_of_halves;
  KeySums sum;
  const auto put = [&](const uint8_t* from) {
    alignas(64) uint32_t words[kTokens];
    kWords(from, words);
    sum.add(words);
    __builtin_memcpy(out, words, sizeof(words));
    out += kPanel * kGroup;
  };
  int64_t i = 0;
  for (; i + kGroup <= features; i += kGroup, codes += kStep) {
    fetch_ahead(codes);
    put(codes);
  }
  if (i < features) {
    uint8_t rest[kStep] = {};
    __builtin_memcpy(rest, codes, (features - i) * kTokens * kBits / 8);
    put(rest);
  }
  sum.store(sums);
}

inline void clear_keys(int64_t groups, int8_t* out) {
  for (int64_t g = 0; g < groups; ++g) {
    __builtin_memset(out + g * kPanel * kGroup, 0, kTokens * kGroup);
  }
}

inline void key_panels_of_quad(const CachePanelsArgs* args) {
  const int64_t groups = (args->features + kGroup - 1) / kGroup;
  const int64_t all = args->stride / (kPanel * kGroup);
  for (int i = 0; i < 4; ++i) {
    const uint8_t* codes = args->blocks[i];
    int8_t* out = args->out + i / 2 * args->stride + i % 2 * kTokens * kGroup;
    int32_t* sums = args->sums + i * kTokens;
    const int64_t filled = codes == nullptr ? 0 : groups;
    clear_keys(all - filled, out + filled * kPanel * kGroup);
    if (codes == nullptr) {
      __builtin_memset(sums, 0, kTokens * sizeof(int32_t));
    } else if (args->bits == 8) {
      keys_of_panel<8>(codes, args->features, out, sums);
    } else {
      keys_of_panel<4>(codes, args->features, out, sums);
    }
  }
}

// The codes of 16 tokens, each in a row of `stride` bytes.
inline void rows_of_values(const uint8_t* codes, int bits, int64_t features, int64_t stride,
                           int8_t* out) {
  const int64_t bytes = features * bits / 8;
  for (int n = 0; n < kTokens; ++n, codes += bytes, out += stride) {
    fetch_ahead(codes);
    if (bits == 8) {
      __builtin_memcpy(out, codes, bytes);
      continue;
    }
    for (int64_t i = 0; i < bytes; ++i) {
      out[i] = static_cast<int8_t>(codes[i] & 15);
      out[bytes + i] = static_cast<int8_t>(codes[i] >> 4);
    }
  }
}

// 32 tokens' values, from two blocks.
inline void values_of_panels(const CachePanelsArgs& args, int half, int8_t* rows) {
  const int64_t width = (args.features + kPanel - 1) / kPanel * kPanel;
  const uint8_t *first = args.blocks[2 * half], *second = args.blocks[2 * half + 1];
  const bool plain = args.bits == 8 && width == args.features && first != nullptr &&
                     second == first + kTokens * width;
  if (!plain) {
    __builtin_memset(rows, 0, kPanel * width);
    for (int i = 0; i < 2; ++i) {
      const uint8_t* codes = args.blocks[2 * half + i];
      if (codes == nullptr) continue;
      rows_of_values(codes, args.bits, args.features, width, rows + i * kTokens * width);
    }
  } else {
    for (int64_t i = 0; i < kPanel * width; i += 64) fetch_ahead(first + i);
  }
  const int8_t* from = plain ? reinterpret_cast<const int8_t*>(first) : rows;
  for (int64_t e = 0; e < width; e += kPanel) {
    interleave_values(from + e, width, args.out + e / kPanel * args.stride + half * kPanel * kPanel,
                      args.sums + half * width + e);
  }
}

inline void value_panels_of_quad(const CachePanelsArgs* args) {
  for (int half = 0; half < 2; ++half) values_of_panels(*args, half, args->rows);
}

}  // namespace
}  // namespace qfx::cpu
