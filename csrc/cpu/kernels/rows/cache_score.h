// Queries of a cache as codes of 16 bits, their scores with panels of keys, and what joins the
// parts of a row. (K3) to (K5)
#pragma once

#include "cpu/kernels/rows/activation.h"
#include "cpu/kernels/rows/softmax.h"
#include "cpu/kernels/rows/store.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// c = rne(q / scale), its bytes; the sum of all c.                                          (K3)
inline int32_t codes_of_query(const CacheQueryArgs* args) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float* __restrict q = args->q;
  uint8_t* __restrict high = args->high, * __restrict low = args->low;
  const int offset = args->offset;
  int32_t sum = 0;
  for (int64_t i = 0; i < args->features; ++i) {
    const int32_t c =
        static_cast<int32_t>(bits_of(fma(q[i], args->inverse, kRound)) - bits_of(kRound));
    high[i] = static_cast<uint8_t>(((c + 128) >> 8) + offset);
    low[i] = static_cast<uint8_t>(c + offset);
    sum += c;
  }
  return sum;
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
  const int32_t* __restrict high = args.raw + (panel * kBytes * args.rows + r) * kPanel;
  const int32_t* __restrict low = high + args.rows * kPanel;
  const uint32_t add_high = static_cast<uint32_t>(args.add[r]),
                 add_low = static_cast<uint32_t>(args.add[args.rows + r]);
  const float row_scale = args.row_scale[r];
  for (int n = 0; n < kPanel; ++n) {
    const uint32_t h = static_cast<uint32_t>(high[n]) + add_high - zero[n];
    const uint32_t l = static_cast<uint32_t>(low[n]) + add_low - zero[n];
    const float sum = static_cast<float>(static_cast<int32_t>(h)) * 256.f +
                      static_cast<float>(static_cast<int32_t>(l));
    each(n, sum * (row_scale * scale[n]));
  }
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
