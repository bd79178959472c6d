// Numbers that become codes of 4 bits, and blocks of a cache that become floats. (K1) (K2)
#pragma once

#include "cpu/kernels/rows/store.h"
#include "cpu/kernels/tables/cache.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline void nibbles_of_row(const float* x, int64_t n, float minimum, float inverse,
                           uint8_t* codes) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < n; ++i) {
    const float v = (x[i] - minimum) * inverse;
    codes[i] = static_cast<uint8_t>(bits_of((v < 15.f ? v : 15.f) + kRound) - bits_of(kRound));
  }
}

// code * scale, or code * scale + minimum, of token n.                                      (K2)
template <int kBits>
inline float value_of(int code, const float* scale, int n) {
  const float c = static_cast<float>(code);
  if constexpr (kBits == 8) return c * scale[n];
  return c * scale[2 * n] + scale[2 * n + 1];
}

// Half `upper` of a byte, or all of it.
template <int kBits>
inline int code_of_byte(uint8_t byte, bool upper) {
  if constexpr (kBits == 8) return static_cast<int8_t>(byte);
  return (byte >> (upper ? 4 : 0)) & 15;
}

template <int kBits>
inline void keys_of(const CacheBlockArgs& args) {
  const int64_t d = args.d;
  for (int64_t i = 0; i < d; ++i) {
    const uint8_t* codes = args.codes + (kBits == 8 ? i : i / 2) * kTokens;
    float column[kTokens];
    for (int n = 0; n < kTokens; ++n) {
      column[n] = value_of<kBits>(code_of_byte<kBits>(codes[n], i % 2 != 0), args.scale, n);
    }
    for (int n = 0; n < kTokens; ++n) args.out[n * d + i] = column[n];
  }
}

template <int kBits>
inline void values_of(const CacheBlockArgs& args) {
  const int64_t bytes = args.d * kBits / 8;
  for (int n = 0; n < kTokens; ++n) {
    const uint8_t* codes = args.codes + n * bytes;
    float* out = args.out + n * args.d;
    for (int64_t i = 0; i < bytes; ++i) {
      out[i] = value_of<kBits>(code_of_byte<kBits>(codes[i], false), args.scale, n);
    }
    if constexpr (kBits == 8) continue;
    for (int64_t i = 0; i < bytes; ++i) {
      out[bytes + i] = value_of<kBits>(code_of_byte<kBits>(codes[i], true), args.scale, n);
    }
  }
}

inline void keys_of_block(const CacheBlockArgs* args) {
  args->bits == 8 ? keys_of<8>(*args) : keys_of<4>(*args);
}

inline void values_of_block(const CacheBlockArgs* args) {
  args->bits == 8 ? values_of<8>(*args) : values_of<4>(*args);
}

}  // namespace
}  // namespace qfx::cpu
