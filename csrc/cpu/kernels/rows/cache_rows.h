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

// NaN where x is infinite or NaN, else 0.
inline float fault_of(float x) { return x - x; }

// Scales and minimums of a block, and what fetches those of the next part.
inline void load_scales(const float* from, int bits, float* scale, float* minimum) {
  const int step = bits == 8 ? 1 : 2;
  for (int i = 0; i < step; ++i) __builtin_prefetch(from + step * kPart + i * kTokens);
  if (bits == 8) {
    for (int n = 0; n < kTokens; ++n) scale[n] = from[n], minimum[n] = 0.f;
  } else {
    for (int n = 0; n < kTokens; ++n) scale[n] = from[2 * n], minimum[n] = from[2 * n + 1];
  }
}

inline void scales_of_block(const CacheScalesArgs* args) {
  constexpr float kSmallest = 0x1p-126f, kFault = __builtin_nanf("");
  if (args->keys == nullptr) {
    for (float* to : {args->key_scale, args->key_minimum, args->value_scale, args->value_minimum}) {
      __builtin_memset(to, 0, kTokens * sizeof(float));
    }
    return;
  }
  float k[kTokens], k_low[kTokens], v[kTokens], v_low[kTokens];
  load_scales(args->keys, args->key_bits, k, k_low);
  load_scales(args->values, args->value_bits, v, v_low);
  for (int n = 0; n < kTokens; ++n) {
    const float of_value = fault_of(v[n]) + fault_of(v_low[n]);
    const float fault = fault_of(k[n]) + fault_of(k_low[n]) + of_value;
    args->key_scale[n] = fault == 0.f ? k[n] : kFault;
    args->key_minimum[n] = fault == 0.f ? k_low[n] : 0.f;
    const float scale = of_value == 0.f ? v[n] : 0.f;
    args->value_scale[n] = scale > kSmallest ? scale : 0.f;
    args->value_minimum[n] = of_value == 0.f ? v_low[n] : 0.f;
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
