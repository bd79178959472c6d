// Scores of attention -> weights -> integer probabilities as plain loops, the definition of the
// vectorized ones. (A4), (A5)
#pragma once

#include "cpu/kernels/rows/activation.h"
#include "cpu/kernels/rows/softmax_mask.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline float plus(float a, float b) { return a + b; }

// 32 become 1: the halves are joined until one is left.
template <float join(float, float), int kCount = kPanel>
inline float by_halves(const float* x) {
  if constexpr (kCount == 1) return x[0];
  float half[kCount / 2 + 1];
  for (int n = 0; n < kCount / 2; ++n) half[n] = join(x[n + kCount / 2], x[n]);
  return by_halves<join, (kCount + 1) / 2>(half);
}

// e^x for x <= 0, 0 below e^-60, NaN for NaN. 2^f, |f| <= 1/2, by a polynomial of error 1e-7.
inline float weight_of(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kRound = 12582912.f + 127;  // 1.5 * 2^23, and the exponent's bias
  const float shifted = fma(x, kLog2e, kRound);
  const float f = fma(x, kLog2e, kRound - shifted);
  float p = 0.001326472032815218f;
  p = fma(p, f, 0.009671512991189957f);
  p = fma(p, f, 0.05550733581185341f);
  p = fma(p, f, 0.24022242426872253f);
  p = fma(p, f, 0.6931470036506653f);
  p = fma(p, f, 1.f);
  const float power = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, shifted) << 23);
  return select(x < -60.f, 0.f, p * power);
}

// Minus infinity where the row does not see a key, the mask added elsewhere; the greatest.
inline float top_of_row(const SoftmaxArgs* args) {
  float top[kPanel];
  for (int n = 0; n < kPanel; ++n) top[n] = -kInfinity;
  for (int64_t first = 0; first < args->keys; first += kPanel) {
    float* __restrict t = args->scores + first;
    if (args->mask != nullptr) add_mask(t, args->mask + first);
    if (args->keys - first < kPanel) hide_from(static_cast<int>(args->keys - first), t);
    for (int n = 0; n < kPanel; ++n) top[n] = larger(t[n], top[n]);
  }
  return by_halves<larger>(top);
}

// Scores -> weights times the values' scales, in place; after the last panel with a key that
// counts, zeros. A row that sees nothing has the sum 0, one with a fault NaN.         (A4) (A5)
inline SoftmaxSums softmax_row(const SoftmaxArgs* args) {
  const float greatest_score = top_of_row(args);
  const float top = greatest_score == -kInfinity ? 0.f : greatest_score;
  float sum[kPanel] = {}, most[kPanel] = {};
  const float* __restrict value_scale = args->value_scale;
  float* __restrict u = args->scores;
  int64_t first = 0;
  for (; first < args->keys; first += kPanel) {
    float w[kPanel];
    for (int n = 0; n < kPanel; ++n) w[n] = weight_of(u[first + n] - top);
    for (int n = 0; n < kPanel; ++n) sum[n] = sum[n] + w[n];
    for (int n = 0; n < kPanel; ++n) {
      const float v = w[n] * value_scale[first + n];
      most[n] = larger(v, most[n]);
      u[first + n] = v;
    }
  }
  for (; first < args->width; ++first) u[first] = 0.f;
  const float largest = by_halves<larger>(most);
  return {by_halves<plus>(sum), largest > 0x1p-100f ? largest : 0x1p-100f};
}

// P = rne(u * factor), its two bytes plus `offset` each.                                   (A5)
inline void probabilities_of_row(const float* __restrict u, int64_t width, float factor,
                                 uint8_t offset, uint8_t* __restrict high,
                                 uint8_t* __restrict low) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: its last bits are those of an integer added
  for (int64_t first = 0; first < width; first += kPanel) {
    uint32_t code[kPanel];
    for (int n = 0; n < kPanel; ++n) {
      code[n] = __builtin_bit_cast(uint32_t, fma(u[first + n], factor, kRound));
    }
    for (int n = 0; n < kPanel; ++n)
      high[first + n] = static_cast<uint8_t>((code[n] >> 8) + offset);
    for (int n = 0; n < kPanel; ++n) low[first + n] = static_cast<uint8_t>(code[n] + offset);
  }
}

}  // namespace
}  // namespace qfx::cpu
