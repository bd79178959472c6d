// Codes of 4 and 5 bits with 256-bit registers: tiles in whose registers they become bytes, and
// groups unpacked. (E4)
//
// Product is what instruction sets differ in:
//     kLines<bits>   so many lines of 8 k are added to a sum before it is closed; 0: all of them
//     kUnsigned      the code u may be any unsigned byte, rather than one below 128
//     add(sum, u, q) the sum and the products of 4 k of 8 columns with a row
//     close(sum)     as 32 bits
//     kPairRows      up to so many rows, the sums of 16 columns leave room for the rest, above of 8
#pragma once

#include <immintrin.h>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/lowbit.h"
#include "cpu/kernels/x86/lowbit_tables.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#define QFX_INLINE inline __attribute__((always_inline))

QFX_INLINE __m256i words_at(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return _mm256_set1_epi32(word);
}

QFX_INLINE __m256i line_at(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// 8 uint8 as 32 bits each.
QFX_INLINE __m256i widened(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// 16 in each byte whose bit is set, 32 of them.
QFX_INLINE __m256i sixteens_at(const uint8_t* bits) {
  const __m256i from =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i which = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i apart = _mm256_and_si256(_mm256_shuffle_epi8(words_at(bits), from), which);
  return _mm256_and_si256(_mm256_cmpeq_epi8(apart, which), _mm256_set1_epi8(16));
}

// 8 k of 8 columns as bytes: u[h] of k = 4 h + j and column n at byte 4 n + j.
template <int kBits>
QFX_INLINE void bytes_of(const uint8_t* nibbles, const uint8_t* fifth, __m256i (&u)[2]) {
  const __m256i low = _mm256_set1_epi8(15), both = line_at(nibbles);
  u[0] = _mm256_and_si256(both, low);
  u[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  if constexpr (kBits == 5) {
    u[0] = _mm256_or_si256(u[0], sixteens_at(fifth));
    u[1] = _mm256_or_si256(u[1], sixteens_at(fifth + 16));
  }
}

// The same of 4 bits with the high nibbles where they are: 16 times as much, without a shift.
QFX_INLINE void bytes_in_place(const uint8_t* nibbles, __m256i (&u)[2]) {
  const __m256i low = _mm256_set1_epi8(15), both = line_at(nibbles);
  u[0] = _mm256_and_si256(both, low);
  u[1] = _mm256_andnot_si256(low, both);
}

QFX_INLINE __m256 scales_at(const uint8_t* p, Dtype dtype) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if (dtype == Dtype::kFloat16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// kRows x (8 * kVectors) sums of a group.
template <class Product, int kBits, int kRows, int kVectors>
struct LowbitSums {
  static constexpr int kClosed = Product::template kLines<kBits>;  // 0: never
  // Few rows whose sums stay open add up the high nibbles apart, so that latency does not bound
  // them.
  static constexpr int kParts = kClosed == 0 && kRows <= 2 ? 2 : 1;
  static constexpr bool kInPlace = kParts == 2 && kBits == 4 && Product::kUnsigned;
  __m256i acc[kRows][kVectors], open[kParts][kRows][kVectors];

  // -row_sum zero. A group has at most 128 codes, so that a row's sum is a number of 16 bits.
  QFX_INLINE void start(const uint8_t* zero, const int32_t* row_sum) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const __m256i less =
          zero == nullptr ? _mm256_set1_epi32(1 << (kBits - 1)) : widened(zero + 8 * v);
      const __m256i z = _mm256_sub_epi16(_mm256_setzero_si256(), less);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] = _mm256_madd_epi16(z, _mm256_set1_epi32(row_sum[r]));
      }
    }
    if constexpr (kClosed == 0) reopen();
  }

  // The products of 8 k, line i of 4.
  QFX_INLINE void add(int i, const uint8_t* nibbles, const uint8_t* fifth, const int8_t* q,
                      int64_t ldq) {
    if (kClosed > 0 && i % kClosed == 0) reopen();
    __m256i u[kVectors][2];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kInPlace) {
        bytes_in_place(nibbles + 32 * v, u[v]);
      } else {
        bytes_of<kBits>(nibbles + 32 * v, fifth + 4 * v, u[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i x = words_at(q + r * ldq + kGroup * h);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          __m256i& to = open[h % kParts][r][v];
          to = Product::add(to, u[v][h], x);
        }
      }
    }
    if (kClosed > 0 && i % kClosed == kClosed - 1) close();
  }

  QFX_INLINE void finish() {
    if constexpr (kClosed == 0) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) keep(open[p]);
      close();
    }
    keep(acc);
  }

 private:
  // GCC 12 would copy them all in each step.
  static QFX_INLINE void keep(__m256i (&sums)[kRows][kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) asm("" : "+x"(sums[r][v]));
    }
  }

  QFX_INLINE void reopen() {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) open[p][r][v] = _mm256_setzero_si256();
      }
    }
  }

  QFX_INLINE void close() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        __m256i sum = Product::close(open[0][r][v]);
        if constexpr (kParts == 2) {
          const __m256i high = open[1][r][v];
          sum = _mm256_add_epi32(sum, kInPlace ? _mm256_srai_epi32(high, 4) : high);
        }
        acc[r][v] = _mm256_add_epi32(acc[r][v], sum);
      }
    }
  }
};

// 8 * kVectors columns of group g, from column `first` on. Fetches its share of the block.
template <class Product, int kBits, int kRows, int kVectors, int kHint>
QFX_INLINE void lowbit_strip(const LowbitTile& t, int64_t g, int first, const uint8_t*& ahead) {
  constexpr int kStep = 32 * kBits / 8 * kVectors * 8;  // bytes of 32 k
  const uint8_t *b = t.b + g * t.block, *nibbles = b + kScaleBytes + 4 * first;
  const uint8_t* fifth = b + kScaleBytes + t.depth / 2 * kPanel + first / 2;
  const int64_t depth = g + 1 < t.groups ? t.depth : t.last_depth, row = g * t.row_step;
  const int8_t* q = t.q + g * t.depth;
  float* sums = t.sums + first;
  LowbitSums<Product, kBits, kRows, kVectors> of_strip;
  of_strip.start(t.zero == nullptr ? nullptr : t.zero + g * kPanel + first, t.row_sum + row);
  for (int64_t k = 0; k < depth; k += 32, ahead += kStep) {
#pragma GCC unroll 5
    for (int i = 0; i < kStep; i += 64) fetch<kHint>(ahead + i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      of_strip.add(i, nibbles, fifth, q + k + 8 * i, t.ldq);
      nibbles += 4 * kPanel;
      fifth += kPanel;
    }
  }
  of_strip.finish();
  asm("" : "+r"(sums));  // or GCC keeps them on the stack
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const __m256 scale = scales_at(b + 2 * (first + 8 * v), t.scales);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 both = _mm256_mul_ps(_mm256_set1_ps(t.row_scale[row + r]), scale);
      float* to = sums + r * kPanel + 8 * v;
      const __m256 exact = _mm256_cvtepi32_ps(of_strip.acc[r][v]);
      _mm256_storeu_ps(to, _mm256_fmadd_ps(exact, both, _mm256_loadu_ps(to)));
    }
  }
}

// A group of a panel is in the first cache when its other columns follow.
template <class Product, int kBits, int kRows, int kHint>
QFX_INLINE void lowbit_panel(const LowbitTile& t) {
  constexpr int kVectors = kRows <= Product::kPairRows ? 2 : 1;
  for (int i = 0; i < kRows * kPanel; i += 8) _mm256_storeu_ps(t.sums + i, _mm256_setzero_ps());
  touch_zeros(t);
  for (int64_t g = 0; g < t.groups; ++g) {
    const uint8_t* ahead = t.b + g * t.block + t.ahead;
    fetch<kHint>(ahead);
    ahead += kScaleBytes;
    for (int n = 0; n < kPanel; n += 8 * kVectors) {
      lowbit_strip<Product, kBits, kRows, kVectors, kHint>(t, g, n, ahead);
    }
  }
}

template <class Product, int kBits, int kRows, int kHint>
void lowbit_tile(const LowbitTile& t) {
  for_each_panel_of<kRows>(
      t, [](const LowbitTile& p) { lowbit_panel<Product, kBits, kRows, kHint>(p); });
}

template <class Product>
struct LowbitTiles {
  template <int kBits, int kRows, int kHint>
  static constexpr LowbitTileFn tile = lowbit_tile<Product, kBits, kRows, kHint>;
};

template <int kBits>
void unpack_group256(const uint8_t* block, int64_t depth, int64_t group, const uint8_t* zero,
                     int8_t* codes, int32_t* colsum) {
  const __m256i one = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  for (int n = 0; n < kPanel; n += 8) {
    const uint8_t* nibbles = block + kScaleBytes + 4 * n;
    const uint8_t* fifth = block + kScaleBytes + group / 2 * kPanel + n / 2;
    int8_t* to = codes + 4 * n;
    const __m256i of = zero == nullptr ? _mm256_set1_epi32(1 << (kBits - 1)) : widened(zero + n);
    const __m256i z = _mm256_mullo_epi32(of, _mm256_set1_epi32(0x01010101));
    __m256i sums = _mm256_setzero_si256();  // in 16 bits: at most 128 codes of at most 31
    for (int64_t k = 0; k < depth; k += 8, nibbles += 4 * kPanel, fifth += kPanel) {
      __m256i u[2];
      bytes_of<kBits>(nibbles, fifth, u);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h, to += 4 * kPanel) {
        const __m256i code = _mm256_sub_epi8(u[h], z);
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(one, code));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), code);
      }
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(colsum + n), _mm256_madd_epi16(sums, ones));
  }
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
