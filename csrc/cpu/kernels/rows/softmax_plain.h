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

// t = float(raw + add - mul colsum) * (row_scale * key_scale), and the mask added; minus infinity
// where the row does not see a key.                                                        (A3)
inline void score_panels(const ScoreArgs* args) {
  for (int64_t r = 0; r < args->rows; ++r) {
    const float* mask = args->mask[r];
    const uint32_t add = static_cast<uint32_t>(args->add[r]);
    const float row_scale = args->row_scale[r];
    float* __restrict top = args->top + r * kPanel;
    for (int64_t p = 0; p < args->panels && args->first + p * kPanel < args->keys[r]; ++p) {
      const int64_t first = args->first + p * kPanel, left = args->keys[r] - first;
      const int32_t* __restrict raw = args->raw + (p * args->rows + r) * kPanel;
      const int32_t* __restrict colsum = args->colsum + p * kPanel;
      const float* __restrict key_scale = args->key_scale + p * kPanel;
      float* __restrict t = args->out + r * args->stride + p * kPanel;
      for (int n = 0; n < kPanel; ++n) {
        const uint32_t zero = static_cast<uint32_t>(args->mul) * static_cast<uint32_t>(colsum[n]);
        const uint32_t acc = static_cast<uint32_t>(raw[n]) + add - zero;
        t[n] = static_cast<float>(static_cast<int32_t>(acc)) * (row_scale * key_scale[n]);
      }
      if (mask != nullptr) add_mask(t, mask + first);
      if (left < kPanel) hide_from(static_cast<int>(left), t);
      for (int n = 0; n < kPanel; ++n) top[n] = larger(t[n], top[n]);
    }
  }
}

inline void greatest_of_rows(const float* top, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; ++r) out[r] = by_halves<larger>(top + r * kPanel);
}

// Scores -> weights times the values' scales, in place; after the last panel with a key that
// counts, zeros. A row that sees nothing has the sum 0, one with a fault NaN.         (A4) (A5)
inline SoftmaxSums softmax_row(const SoftmaxArgs* args) {
  const float top = args->greatest == -kInfinity ? 0.f : args->greatest;
  float sum[kPanel] = {}, most[kPanel] = {}, low[kPanel] = {};
  const float* __restrict value_scale = args->value_scale;
  float* __restrict u = args->scores;
  int64_t first = 0;
  for (; first < args->keys; first += kPanel) {
    float w[kPanel];
    for (int n = 0; n < kPanel; ++n) w[n] = weight_of(u[first + n] - top);
    for (int n = 0; n < kPanel; ++n) sum[n] = sum[n] + w[n];
    for (int n = 0; args->minimum != nullptr && n < kPanel; ++n) {
      low[n] = low[n] + w[n] * args->minimum[first + n];
    }
    for (int n = 0; n < kPanel; ++n) {
      const float v = w[n] * value_scale[first + n];
      most[n] = larger(v, most[n]);
      u[first + n] = v;
    }
  }
  for (; first < args->width; ++first) u[first] = 0.f;
  const float largest = by_halves<larger>(most);
  return {by_halves<plus>(sum), largest > 0x1p-100f ? largest : 0x1p-100f, by_halves<plus>(low)};
}

// The gradients of a row's scores, in place of its products. (A12)
inline void score_gradient_of_row(const ScoreGradientArgs* args) {
  constexpr float kSmallest = 0x1p-126f;
  const float* __restrict w = args->weights;
  float* __restrict y = args->products;
  float sum[kPanel] = {};
  for (int64_t first = 0; first < args->width; first += kPanel) {
    for (int n = 0; n < kPanel; ++n) {
      const float weight = w[first + n];
      sum[n] = sum[n] + select(weight < kSmallest, 0.f, weight * y[first + n]);
    }
  }
  const float mean = by_halves<plus>(sum) * args->inverse;
  for (int64_t n = 0; n < args->width; ++n) {
    y[n] = select(w[n] < kSmallest, 0.f, w[n] * (y[n] - mean));
  }
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
