// Codes of 4 and 5 bits with AVX-512 VNNI: tiles in whose registers they become bytes, and groups
// unpacked. (E4)
#pragma once

#include <immintrin.h>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/tables/lowbit.h"
#include "cpu/kernels/x86/lowbit_tables.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#define QFX_INLINE inline __attribute__((always_inline))

QFX_INLINE __mmask64 mask_at(const uint8_t* p) {
  uint64_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}

QFX_INLINE __m512i codes_at(const int8_t* q) {
  int32_t word;
  __builtin_memcpy(&word, q, sizeof(word));
  return _mm512_set1_epi32(word);
}

// 16 uint8 as 32 bits each.
QFX_INLINE __m512i widened(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// 8 k of 32 columns as bytes: u[h][v] of k = 4 h + j and column 16 v + n at byte 4 n + j.
template <int kBits>
QFX_INLINE void bytes_of(const uint8_t* nibbles, const uint8_t* fifth, __m512i (&u)[2][2]) {
  const __m512i low = _mm512_set1_epi8(15), sixteen = _mm512_set1_epi8(16);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const __m512i both = _mm512_loadu_si512(nibbles + 64 * v);
    u[0][v] = _mm512_and_si512(both, low);
    u[1][v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    if constexpr (kBits == 5) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __mmask64 has_fifth = mask_at(fifth + 16 * h + 8 * v);
        u[h][v] = _mm512_mask_add_epi8(u[h][v], has_fifth, u[h][v], sixteen);
      }
    }
  }
}

// The same of 4 bits with the high nibbles where they are: 16 times as much, without a shift.
QFX_INLINE void bytes_in_place(const uint8_t* nibbles, __m512i (&u)[2][2]) {
  const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const __m512i both = _mm512_loadu_si512(nibbles + 64 * v);
    u[0][v] = _mm512_and_si512(both, low);
    u[1][v] = _mm512_andnot_si512(low, both);
  }
}

QFX_INLINE __m512 scales_at(const uint8_t* p, Dtype dtype) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if (dtype == Dtype::kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// The sums of a group: of kRows rows and 32 columns, in registers. Few rows add up the high nibbles
// apart, so that the latency of vpdpbusd does not bound them.
template <int kBits, int kRows>
struct LowbitSums {
  static constexpr int kParts = kRows <= 4 ? 2 : 1;
  static constexpr bool kInPlace = kParts == 2 && kBits == 4;
  __m512i acc[kParts][kRows][2];

  // -row_sum zero. A group has at most 128 codes, so that a row's sum is a number of 16 bits.
  QFX_INLINE void start(const uint8_t* zero, const int32_t* row_sum) {
    const __m512i none = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i less =
          zero == nullptr ? _mm512_set1_epi32(1 << (kBits - 1)) : widened(zero + 16 * v);
      const __m512i z = _mm512_sub_epi16(none, less);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[0][r][v] = _mm512_madd_epi16(z, _mm512_set1_epi32(row_sum[r]));
        if constexpr (kParts == 2) acc[1][r][v] = none;
      }
    }
  }

  // The products of 8 k.
  QFX_INLINE void add(const uint8_t* nibbles, const uint8_t* fifth, const int8_t* q, int64_t ldq) {
    __m512i u[2][2];
    if constexpr (kInPlace) {
      bytes_in_place(nibbles, u);
    } else {
      bytes_of<kBits>(nibbles, fifth, u);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m512i x = codes_at(q + r * ldq + kGroup * h);
        __m512i(&to)[2] = acc[h % kParts][r];
        to[0] = _mm512_dpbusd_epi32(to[0], u[h][0], x);
        to[1] = _mm512_dpbusd_epi32(to[1], u[h][1], x);
      }
    }
  }

  // GCC 12 would copy them all in each step.
  QFX_INLINE void keep() {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) asm("" : "+v"(acc[p][r][0]), "+v"(acc[p][r][1]));
    }
  }

  QFX_INLINE __m512 total(int r, int v) const {
    __m512i exact = acc[0][r][v];
    if constexpr (kParts == 2) {
      const __m512i high = kInPlace ? _mm512_srai_epi32(acc[1][r][v], 4) : acc[1][r][v];
      exact = _mm512_add_epi32(exact, high);
    }
    return _mm512_cvtepi32_ps(exact);
  }
};

template <int kBits, int kRows, int kHint>
QFX_INLINE void lowbit_panel(const LowbitTile& t) {
  const uint8_t *b = t.b, *zero = t.zero;
  const int8_t* q = t.q;
  const int32_t* row_sum = t.row_sum;
  const float* row_scale = t.row_scale;
  float* sums = t.sums;
  const __m512 none = _mm512_setzero_ps();
  for (int i = 0; i < kRows * kPanel; i += 16) _mm512_storeu_ps(sums + i, none);
  touch_zeros(t);
  for (int64_t g = 0; g < t.groups; ++g, b += t.block) {
    const int64_t depth = g + 1 < t.groups ? t.depth : t.last_depth;
    const uint8_t *nibbles = b + kScaleBytes, *fifth = nibbles + t.depth / 2 * kPanel;
    fetch<kHint>(b + t.ahead);
    LowbitSums<kBits, kRows> of_group;
    of_group.start(zero, row_sum);
    for (int64_t k = 0; k < depth; k += 32) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        fetch<kHint>(nibbles + t.ahead);
        fetch<kHint>(nibbles + t.ahead + 64);
        if (kBits == 5 && i % 2 == 0) fetch<kHint>(fifth + t.ahead);
        of_group.add(nibbles, fifth, q + k + 8 * i, t.ldq);
        nibbles += 4 * kPanel;
        fifth += kPanel;
      }
    }
    of_group.keep();
    asm("" : "+r"(sums));  // nor keep them on the stack from group to group
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512 scale = scales_at(b + kScaleBytes / 2 * v, t.scales);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* to = sums + r * kPanel + 16 * v;
        const __m512 both = _mm512_mul_ps(_mm512_set1_ps(row_scale[r]), scale);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(of_group.total(r, v), both, _mm512_loadu_ps(to)));
      }
    }
    q += t.depth;
    row_sum += t.row_step;
    row_scale += t.row_step;
    if (zero != nullptr) zero += kPanel;
  }
}

template <int kBits, int kRows, int kHint>
void lowbit_tile(const LowbitTile& t) {
  for_each_panel_of<kRows>(t, [](const LowbitTile& p) { lowbit_panel<kBits, kRows, kHint>(p); });
}

struct LowbitTiles {
  template <int kBits, int kRows, int kHint>
  static constexpr LowbitTileFn tile = lowbit_tile<kBits, kRows, kHint>;
};

template <int kBits>
void unpack_group512(const uint8_t* block, int64_t depth, int64_t group, const uint8_t* zero,
                     int8_t* codes, int32_t* colsum) {
  const uint8_t *nibbles = block + kScaleBytes, *fifth = nibbles + group / 2 * kPanel;
  const __m512i one = _mm512_set1_epi8(1);
  __m512i z[2], sums[2][2];  // of low and high nibbles apart, for the latency of vpdpbusd
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const __m512i of =
        zero == nullptr ? _mm512_set1_epi32(1 << (kBits - 1)) : widened(zero + 16 * v);
    z[v] = _mm512_mullo_epi32(of, _mm512_set1_epi32(0x01010101));
    sums[0][v] = sums[1][v] = _mm512_setzero_si512();
  }
  for (int64_t k = 0; k < depth; k += 8, nibbles += 4 * kPanel, fifth += kPanel) {
    __m512i u[2][2];
    bytes_of<kBits>(nibbles, fifth, u);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v, codes += 64) {
        const __m512i code = _mm512_sub_epi8(u[h][v], z[v]);
        sums[h][v] = _mm512_dpbusd_epi32(sums[h][v], one, code);
        _mm512_storeu_si512(codes, code);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    _mm512_storeu_si512(colsum + 16 * v, _mm512_add_epi32(sums[0][v], sums[1][v]));
  }
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
