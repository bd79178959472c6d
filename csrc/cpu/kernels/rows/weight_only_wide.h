// Rows of floats times int8 weights with the vectors of AVX2 and AVX-512. (W1)
#pragma once

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/row_pointers.h"
#include "cpu/kernels/rows/vector.h"
#include "cpu/kernels/tables/weight_only.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

#define QFX_INLINE inline __attribute__((always_inline))

// Codes of 4 k and a vector of columns.
#if defined(__AVX512BW__)
struct CodeQuads {
  __m512i w, high;

  QFX_INLINE explicit CodeQuads(const int8_t* b)
      : w(_mm512_loadu_si512(b)), high(_mm512_srli_epi32(w, 16)) {}

  // Those of k = kByte as floats. An unsigned byte beside the exponent of a power of two is its
  // sum with that power; the codes are made unsigned by adding 128. This takes one operation less
  // than shifts and a conversion, and any port.
  template <int kByte>
  QFX_INLINE __m512 floats() const {
    if constexpr (kByte == 0) return beside<0x4b000080, 0xff>(w, 8388608.f + 128.f);  // 2^23
    if constexpr (kByte == 1) return beside<0x47008000, 0xff00>(w, 32768.f + 128.f);  // 2^15
    if constexpr (kByte == 2) return beside<0x4b000080, 0xff>(high, 8388608.f + 128.f);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(w, 24));
  }

 private:
  template <int32_t kPower, int32_t kMask>
  static QFX_INLINE __m512 beside(__m512i w, float power) {
    constexpr int kXorOfAnd = 0x78;  // a ^ (b & c)
    const __m512i sum = _mm512_ternarylogic_epi32(_mm512_set1_epi32(kPower), w,
                                                  _mm512_set1_epi32(kMask), kXorOfAnd);
    return _mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(power));
  }
};

template <int kRows>
using RowsOfTile = RowPointers<float, kRows>;

constexpr int kChainsAtOnce = 2;  // of a tile of floats, whose sums fill the registers
template <int kRows>
constexpr int kVectorsOfCodes = 2;  // of columns at a time
#else
struct CodeQuads {
  __m256i w;

  QFX_INLINE explicit CodeQuads(const int8_t* b)
      : w(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b))) {}

  template <int kByte>
  QFX_INLINE __m256 floats() const {
    const __m256i first = kByte < 3 ? _mm256_slli_epi32(w, 24 - 8 * kByte) : w;
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(first, 24));
  }
};

// With 16 vector registers GCC keeps the sums in them only where it chooses all addresses itself.
template <int kRows>
struct RowsOfTile {
  const float* first;
  int64_t stride;

  QFX_INLINE float at(int r, int k) const { return first[r * stride + k]; }
  QFX_INLINE void move(int64_t elements) { first += elements; }
  QFX_INLINE void hide() { asm("" : "+r"(first)); }
};

constexpr int kChainsAtOnce = 1;
template <int kRows>
constexpr int kVectorsOfCodes = kRows == 1   ? 4
                                : kRows == 2 ? 2
                                             : 1;
#endif

using wide::Vector;

// The codes of k = kByte.
template <int kByte, int kRows, int kVectors>
QFX_INLINE void add_codes(const RowsOfTile<kRows>& x, const CodeQuads& codes, int v,
                          Vector (&s)[2][kRows][kVectors]) {
  const Vector w = codes.template floats<kByte>();
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    Vector& to = s[kByte / 2][r][v];
    to = wide::multiply_add(wide::all(x.at(r, kByte)), w, to);
  }
}

// kVectors vectors of columns.
template <int kRows, int kVectors, int kHint>
QFX_INLINE void columns_of_codes(const float* first, int64_t ldx, const int8_t* b, int64_t groups,
                                 int64_t ahead, float* sums) {
  Vector s[2][kRows][kVectors] = {};
  RowsOfTile<kRows> x{first, ldx};
  for (int64_t g = 0; g < groups; ++g, x.move(kGroup), b += kPanel * kGroup) {
    fetch<kHint>(b + ahead);
    if constexpr (kVectors * wide::kLanes > 16) fetch<kHint>(b + ahead + 64);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      // Or GCC keeps 4 k of all rows from vector to vector, and spills.
      if constexpr (kRows > 1) x.hide();
      const CodeQuads codes(b + v * wide::kLanes * kGroup);
      add_codes<0>(x, codes, v, s);
      add_codes<1>(x, codes, v, s);
      add_codes<2>(x, codes, v, s);
      add_codes<3>(x, codes, v, s);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      wide::store(sums + r * kPanel + v * wide::kLanes, wide::add(s[0][r][v], s[1][r][v]));
    }
  }
}

template <int kRows, int kHint>
void weight_only(const float* x, int64_t ldx, const int8_t* b, int64_t groups, int64_t ahead,
                 float* sums) {
  constexpr int kColumns = kVectorsOfCodes<kRows> * wide::kLanes;
  for (int n = 0; n < kPanel; n += kColumns) {
    columns_of_codes<kRows, kVectorsOfCodes<kRows>, kHint>(x, ldx, b + n * kGroup, groups, ahead,
                                                           sums + n);
  }
}

inline void floats_of_codes(const int8_t* b, int64_t groups, float* w) {
  const int8_t* ahead = b + groups * kPanel * kGroup;
  for (int64_t g = 0; g < groups; ++g, ahead += kPanel * kGroup, w += kPanel * kGroup) {
    fetch<kT0>(ahead);
    fetch<kT0>(ahead + 64);
#pragma GCC unroll 4
    for (int n = 0; n < kPanel; n += wide::kLanes, b += wide::kLanes * kGroup) {
      const CodeQuads codes(b);
      wide::store(w + n, codes.floats<0>());
      wide::store(w + n + kPanel, codes.floats<1>());
      wide::store(w + n + 2 * kPanel, codes.floats<2>());
      wide::store(w + n + 3 * kPanel, codes.floats<3>());
    }
  }
}

template <int kRows>
using Chains = Vector[2][kRows][2];  // [i][m] of two vectors of columns

// Chains kFirst to kEnd - 1 of columns n and up go on.
template <int kFirst, int kEnd, int kRows>
QFX_INLINE void go_on(const FloatTile& t, int n, Chains<kRows>& s) {
  RowsOfTile<kRows> x{t.x, t.ldx};
  const float* w = t.w + n;
  for (int64_t g = 0; g < t.groups; ++g, x.move(kGroup), w += kPanel * kGroup) {
#pragma GCC unroll 4
    for (int k = 2 * kFirst; k < 2 * kEnd; ++k) {
      const Vector w0 = wide::load(w + k * kPanel);
      const Vector w1 = wide::load(w + k * kPanel + wide::kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Vector one = wide::all(x.at(r, k));
        s[k / 2][r][0] = wide::multiply_add(one, w0, s[k / 2][r][0]);
        s[k / 2][r][1] = wide::multiply_add(one, w1, s[k / 2][r][1]);
      }
    }
  }
}

template <int kRows>
QFX_INLINE void go_on(const FloatTile& t, int n, Chains<kRows>& s) {
  if constexpr (kChainsAtOnce == 2) {
    go_on<0, 2, kRows>(t, n, s);
  } else {
    go_on<0, 1, kRows>(t, n, s);
    go_on<1, 2, kRows>(t, n, s);
  }
}

// f(i, m, v, what is [m][i][32] of a tile's chains at columns n + v * lanes).
template <int kRows, typename F>
QFX_INLINE void for_each_chain(const F& f) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) f(i, r, v, (2 * r + i) * kPanel + v * wide::kLanes);
    }
  }
}

template <int kRows>
void weight_only_chains(const FloatTile& t, float* all) {
  for (int n = 0; n < kPanel; n += 2 * wide::kLanes) {
    Chains<kRows> s;
    for_each_chain<kRows>(
        [&](int i, int r, int v, int at) { s[i][r][v] = wide::load(all + n + at); });
    go_on<kRows>(t, n, s);
    for_each_chain<kRows>(
        [&](int i, int r, int v, int at) { wide::store(all + n + at, s[i][r][v]); });
  }
}

template <int kRows>
void weight_only_scaled(const FloatTile& t, const float* scale, float* sums) {
  for (int n = 0; n < kPanel; n += 2 * wide::kLanes) {
    Chains<kRows> s;
    for_each_chain<kRows>([&](int i, int r, int v, int) { s[i][r][v] = wide::all(0.f); });
    go_on<kRows>(t, n, s);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int column = n + v * wide::kLanes;
        float* to = sums + r * kPanel + column;
        const Vector sum = wide::add(s[0][r][v], s[1][r][v]);
        wide::store(to, wide::multiply_add(sum, wide::load(scale + column), wide::load(to)));
      }
    }
  }
}

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
