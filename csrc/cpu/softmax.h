// The rows of attention between its two products: integer scores -> floats -> integer
// probabilities. Plain loops, compiled by each instruction set's file; the same bits on all.
// A row's scores lie in panels of 32 keys, `step` elements apart, and become floats in place.
#pragma once

#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/store.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr float kNegativeInfinity = -__builtin_inff();

// t = float(raw + add - mul colsum) * (row_scale * key_scale) + mask; minus infinity beyond `keys`.
// Returns the greatest score, NaN where one is NaN.                                        (A3)
inline float score_row(const ScoreArgs* args) {
  float top[kPanel];
  int32_t faults[kPanel] = {};
  for (int n = 0; n < kPanel; ++n) top[n] = kNegativeInfinity;
  const uint32_t add = static_cast<uint32_t>(args->add), mul = static_cast<uint32_t>(args->mul);
  for (int64_t first = 0, p = 0; first < args->width; first += kPanel, ++p) {
    int32_t* raw = args->scores + p * args->step;
    const float* key_scale = args->key_scale + first;
    const int32_t* colsum = args->colsum + first;
    float t[kPanel];
    for (int n = 0; n < kPanel; ++n) {
      const uint32_t acc =
          static_cast<uint32_t>(raw[n]) + add - mul * static_cast<uint32_t>(colsum[n]);
      t[n] = static_cast<float>(static_cast<int32_t>(acc)) * (args->row_scale * key_scale[n]);
    }
    if (args->mask != nullptr) {
      for (int n = 0; n < kPanel; ++n) t[n] = t[n] + args->mask[first + n];
    }
    if (args->keys - first < kPanel) {
      const int left = args->keys > first ? static_cast<int>(args->keys - first) : 0;
      for (int n = 0; n < kPanel; ++n) t[n] = n < left ? t[n] : kNegativeInfinity;
    }
    for (int n = 0; n < kPanel; ++n) {
      top[n] = t[n] > top[n] ? t[n] : top[n];
      faults[n] |= t[n] != t[n] ? 1 : 0;
    }
    for (int n = 0; n < kPanel; ++n) raw[n] = __builtin_bit_cast(int32_t, t[n]);
  }
  float greatest = kNegativeInfinity;
  int32_t faulty = 0;
  for (int n = 0; n < kPanel; ++n) {
    greatest = top[n] > greatest ? top[n] : greatest;
    faulty |= faults[n];
  }
  return faulty != 0 ? __builtin_nanf("") : greatest;
}

// P = rne(65535 exp(t - top)) as two bytes, each less 128. Returns the sum of P.           (A4)
inline int64_t probabilities_of_row(const int32_t* scores, int64_t step, int64_t width, float top,
                                    int8_t* high, int8_t* low) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  int64_t total = 0;
  for (int64_t first = 0, p = 0; first < width; first += kPanel, ++p) {
    int32_t code[kPanel], sum = 0;
    for (int n = 0; n < kPanel; ++n) {
      const float t = __builtin_bit_cast(float, scores[p * step + n]);
      const float shifted = exp_of(t - top) * 65535.f + kRound;
      code[n] = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRound);
    }
    for (int n = 0; n < kPanel; ++n) sum += code[n];
    for (int n = 0; n < kPanel; ++n) {
      high[first + n] = static_cast<int8_t>((code[n] >> 8) - 128);
      low[first + n] = static_cast<int8_t>((code[n] & 255) - 128);
    }
    total += sum;
  }
  return total;
}

// y = float(256 high + low) * (inverse * scale), high and low as score_row's integers.      (A6)
inline void mix_row(const MixArgs* args) {
  alignas(64) float y[kPanel];
  const uint32_t add_high = static_cast<uint32_t>(args->add[0]),
                 add_low = static_cast<uint32_t>(args->add[1]);
  const uint32_t mul = static_cast<uint32_t>(args->mul);
  for (int n = 0; n < kPanel; ++n) {
    const uint32_t zero = mul * static_cast<uint32_t>(args->colsum[n]);
    const uint32_t high = static_cast<uint32_t>(args->high[n]) + add_high - zero;
    const uint32_t low = static_cast<uint32_t>(args->low[n]) + add_low - zero;
    const float sum = static_cast<float>(static_cast<int32_t>(high)) * 256.f +
                      static_cast<float>(static_cast<int32_t>(low));
    y[n] = sum * (args->inverse * args->scale[n]);
  }
  store_row(y, args->columns, args->dtype, args->out);
}

}  // namespace
}  // namespace qfx::cpu
