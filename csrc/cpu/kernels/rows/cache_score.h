// Queries of a cache as codes of 22 bits, their scores with panels of keys, and what joins the
// parts of a row. (K3) to (K5)
#pragma once

#include "cpu/kernels/rows/activation.h"
#include "cpu/kernels/rows/softmax.h"
#include "cpu/kernels/rows/store.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer

// c = rne(q / scale), its bytes; the sum of all c.                                          (K3)
inline int32_t codes_of_query(const CacheQueryArgs* args) {
  const float* __restrict q = args->q;
  uint8_t* __restrict high = args->bytes[0];
  uint8_t* __restrict middle = args->bytes[1];
  uint8_t* __restrict low = args->bytes[2];
  const int offset = args->offset;
  int32_t sum = 0;
  for (int64_t i = 0; i < args->features; ++i) {
    const uint32_t bits = bits_of(fma(q[i], args->inverse, kToInteger)) - bits_of(kToInteger);
    const int32_t c = static_cast<int32_t>(bits), h = (c + 16384) >> 15, g = c - (h << 15);
    high[i] = static_cast<uint8_t>(h + offset);
    middle[i] = static_cast<uint8_t>(((g + 128) >> 8) + offset);
    low[i] = static_cast<uint8_t>(g + offset);
    sum += c;
  }
  return sum;
}

// out[n] = byte 2 of P, plus offset.
inline void third_bytes(const float* __restrict u, int64_t width, float factor, uint32_t offset,
                        uint8_t* __restrict out) {
  for (int64_t first = 0; first < width; first += kPanel) {
    uint32_t p[kPanel];
    for (int n = 0; n < kPanel; ++n) p[n] = bits_of(fma(u[first + n], factor, kToInteger));
    for (int n = 0; n < kPanel; ++n) {
      out[first + n] = static_cast<uint8_t>(((p[n] - bits_of(kToInteger)) >> 16) + offset);
    }
  }
}

// P = rne(u * factor), its bytes.                                                           (K4)
inline void bytes_of_probabilities(const CacheBytesArgs* given) {
  const CacheBytesArgs args = *given;
  third_bytes(args.u, args.width, args.factor, args.offset, args.bytes[0]);
  probabilities_of_row(args.u, args.width, args.factor, args.offset, args.bytes[1], args.bytes[2]);
}

// unit H + (256 M + L) of three sums, from each of which `zero` is taken.
inline float sum_of_bytes(float unit, uint32_t high, uint32_t middle, uint32_t low, uint32_t zero) {
  const auto number = [&](uint32_t x) {
    return static_cast<float>(static_cast<int32_t>(x - zero));
  };
  return number(high) * unit + (number(middle) * 256.f + number(low));
}

// The sums of row r of a panel: each(n, sum).
template <typename F>
inline void sums_of_row(float unit, const int32_t* __restrict raw, const int32_t* add, int64_t rows,
                        int64_t r, const uint32_t* __restrict zero, const F& each) {
  const int32_t* __restrict high = raw + r * kPanel;
  const int32_t* __restrict middle = high + rows * kPanel;
  const int32_t* __restrict low = middle + rows * kPanel;
  const uint32_t add_high = static_cast<uint32_t>(add[r]),
                 add_middle = static_cast<uint32_t>(add[rows + r]),
                 add_low = static_cast<uint32_t>(add[2 * rows + r]);
  for (int n = 0; n < kPanel; ++n) {
    each(n, sum_of_bytes(unit, static_cast<uint32_t>(high[n]) + add_high,
                         static_cast<uint32_t>(middle[n]) + add_middle,
                         static_cast<uint32_t>(low[n]) + add_low, zero[n]));
  }
}

// (K5)
inline void mix_bytes(const CacheMixArgs* given) {
  const CacheMixArgs args = *given;
  alignas(64) uint32_t zero[kPanel];
  for (int n = 0; n < kPanel; ++n) {
    zero[n] = static_cast<uint32_t>(args.mul) * static_cast<uint32_t>(args.colsum[n]);
  }
  for (int64_t r = 0; r < args.rows; ++r) {
    float* __restrict out = args.out + r * args.stride;
    const float factor = args.factor[r];
    sums_of_row(65536.f, args.raw, args.add, args.rows, r, zero,
                [&](int n, float sum) { out[n] = sum * factor; });
  }
}

// softcap tanh(t / softcap), by tanh(u) = 1 - 2 / (exp(2 u) + 1).                           (K3)
inline void cap_scores(float softcap, float* scores) {
  const float twice = 2.f / softcap, span = 2.f * softcap;
  for (int n = 0; n < kPanel; ++n) scores[n] = softcap - span / (exp_of(scores[n] * twice) + 1.f);
}

// What the integers of a row and a panel become: each(n, t) for every key.
template <typename F>
inline void scores_of_panel(const CacheScoreArgs& args, int64_t r, int64_t panel,
                            const uint32_t* __restrict zero, const F& each) {
  const float* __restrict scale = args.key_scale + panel * kPanel;
  const float row_scale = args.row_scale[r];
  sums_of_row(32768.f, args.raw + panel * kBytes * args.rows * kPanel, args.add, args.rows, r, zero,
              [&](int n, float sum) { each(n, sum * (row_scale * scale[n])); });
}

// Minimums, the softcap and the mask.
inline void change_scores(const CacheScoreArgs& args, int64_t r, int64_t at, float* t) {
  if (args.minimum != nullptr) {
    const float sum = args.row_sum[r];
    for (int n = 0; n < kPanel; ++n) t[n] = t[n] + sum * args.minimum[at + n];
  }
  if (args.softcap != 0.f) cap_scores(args.softcap, t);
  if (args.mask[r] != nullptr) add_mask(t, args.mask[r] + at);
}

inline void cache_scores(const CacheScoreArgs* given) {
  const CacheScoreArgs args = *given;
  const bool all_change = args.minimum != nullptr || args.softcap != 0.f;
  for (int64_t p = 0; p < args.panels; ++p) {
    const int64_t at = p * kPanel;
    alignas(64) uint32_t zero[kPanel];
    for (int n = 0; n < kPanel; ++n) {
      zero[n] = static_cast<uint32_t>(args.mul) * static_cast<uint32_t>(args.colsum[at + n]);
    }
    for (int64_t r = 0; r < args.rows; ++r) {
      float* __restrict out = args.out + r * args.stride + at;
      float* __restrict top = args.top + r * kPanel;
      if (!all_change && args.mask[r] == nullptr) {
        scores_of_panel(args, r, p, zero,
                        [&](int n, float t) { out[n] = t, top[n] = larger(t, top[n]); });
        continue;
      }
      alignas(64) float t[kPanel];
      scores_of_panel(args, r, p, zero, [&](int n, float score) { t[n] = score; });
      change_scores(args, r, at, t);
      for (int n = 0; n < kPanel; ++n) out[n] = t[n], top[n] = larger(t[n], top[n]);
    }
  }
}

// The weight of what has the greatest score `top` beside what has `most`.                  (K5)
inline float share_of(float top, float most) {
  const float t = top - most;
  return select(t < -80.f, 0.f, exp_of(t));
}

inline void merge_part(const CacheMergeArgs* args) {
  const CacheSums part = args->part, before = *args->all;
  if (part.sum == 0.f) return;  // the row sees no key of it
  const bool first = before.sum == 0.f;
  const float most = first ? part.top : larger(part.top, before.top);
  const float a = first ? 0.f : share_of(before.top, most), b = share_of(part.top, most);
  *args->all = {most, before.sum * a + part.sum * b, 0.f};
  float* __restrict y = args->y;
  const float* __restrict part_y = args->part_y;
  for (int64_t e = 0; e < args->e; ++e) y[e] = y[e] * a + (part_y[e] + part.minimums) * b;
}

}  // namespace
}  // namespace qfx::cpu
