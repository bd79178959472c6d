// Scores of a few rows of queries with the keys of a cache, 16 keys side by side, and what softmax
// makes of them. (K3) (K4)
#pragma once

#include "cpu/kernels/rows/cache_codes.h"
#include "cpu/kernels/rows/softmax_mask.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

// Of four features of kFloats keys those from `first` on: four, or two, or as many as there are.
template <int kBits>
inline void features(const uint8_t* codes, int first, int64_t count, Floats* x) {
  if constexpr (kBits == 8) {
    for (int c = 0; c < count; ++c) x[c] = signed_codes(codes + (first + c) * kTokens);
  } else {
    halves(codes + first / 2 * kTokens, x, x + 1);
    if (count > 2) halves(codes + kTokens, x + 2, x + 3);
  }
}

// s[r][c] = the chain of features i with i mod 4 = first + c.                                (K3)
template <int kRows, int kChains, int kBits, bool kFetch>
inline void chains(const uint8_t* at, int64_t d, int first, const float* q, int64_t stride,
                   Floats (*s)[4]) {
  constexpr int64_t kStep = 4 * kTokens * kBits / 8;
  Floats sums[kRows][kChains] = {};
  q += first;
  int64_t i = 0;
  for (; i + 4 <= d; i += 4, at += kStep) {
    if constexpr (kFetch) fetch_ahead(at);
    Floats x[kChains];
    features<kBits>(at, first, kChains, x);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        sums[r][c] = multiply_add(all_of(q[r * stride + i + c]), x[c], sums[r][c]);
      }
    }
  }
  const int64_t left = d - i - first, rest = left < kChains ? left : kChains;
  if (rest > 0) {
    Floats x[4] = {};
    features<kBits>(at, first, rest, x);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        if (c < rest) sums[r][c] = multiply_add(all_of(q[r * stride + i + c]), x[c], sums[r][c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) s[r][first + c] = sums[r][c];
  }
}

// dots[r][n] = (s0 + s1) + (s2 + s3). (K3)
template <int kRows, int kBits>
inline void dots_of_block(const uint8_t* codes, int64_t d, const float* q, int64_t stride,
                          float (*dots)[kTokens]) {
  constexpr int kChains = 4 * kRows <= kRoom ? 4 : 2;
  for (int part = 0; part < kTokens; part += kFloats) {
    Floats s[kRows][4];
    chains<kRows, kChains, kBits, true>(codes + part, d, 0, q, stride, s);
    if constexpr (kChains == 2) {
      chains<kRows, kChains, kBits, false>(codes + part, d, 2, q, stride, s);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats sum = (s[r][0] + s[r][1]) + (s[r][2] + s[r][3]);
      __builtin_memcpy(dots[r] + part, &sum, sizeof(sum));
    }
  }
}

// The scales of a block, and in 4 bits its minimums.
template <int kBits>
inline void scales_of_block(const float* scale, float* scales, float* minimums) {
  for (int n = 0; n < kTokens; ++n) {
    scales[n] = scale[kBits == 8 ? n : 2 * n];
    if constexpr (kBits == 4) minimums[n] = scale[2 * n + 1];
  }
}

// softcap tanh(t / softcap), by tanh(u) = 1 - 2 / (exp(2 u) + 1).                           (K3)
inline void cap_scores(float softcap, float* scores) {
  const float twice = 2.f / softcap, span = 2.f * softcap;
  for (int n = 0; n < kTokens; ++n) scores[n] = softcap - span / (exp_of(scores[n] * twice) + 1.f);
}

// What a block of scores becomes: times the keys' scales, capped, plus the mask.            (K3)
template <int kBits>
inline void finish_scores(const float* dots, const float* scales, const float* minimums,
                          float q_sum, float softcap, const float* added, int64_t keys,
                          float* scores) {
  for (int n = 0; n < kTokens; ++n) {
    float t = dots[n] * scales[n];
    if constexpr (kBits == 4) t = t + q_sum * minimums[n];
    scores[n] = t;
  }
  if (softcap != 0.f) cap_scores(softcap, scores);
  if (added != nullptr) {
    for (int n = 0; n < kTokens; ++n) {
      const float b = added[n], t = scores[n] + b;
      scores[n] = b == -kInfinity ? -kInfinity : t;
    }
  }
  for (int64_t n = keys; n < kTokens; ++n) scores[n] = -kInfinity;
}

template <int kBits>
inline void cache_scores_of(const CacheScoreArgs& args) {
  constexpr int64_t kPairs = kBits == 8 ? 1 : 2;
  const int64_t block_bytes = args.d * kTokens * kBits / 8;
  for (int64_t i = 0; i < args.seen.count; ++i) {
    const int64_t stored = args.seen.stored[i], first = int64_t{args.seen.at[i]} * kTokens;
    const uint8_t* codes = args.codes + stored * block_bytes;
    alignas(64) float scales[kTokens], minimums[kTokens];
    scales_of_block<kBits>(args.scale + stored * kTokens * kPairs, scales, minimums);
    const int64_t left = args.seen.length - first, keys = left < kTokens ? left : kTokens;
    for (int64_t r = 0, count; r < args.rows; r += count) {
      count = rows_at_once(args.rows - r);
      alignas(64) float dots[4][kTokens];
      by_rows(count, [&]<int kRows>() {
        dots_of_block<kRows, kBits>(codes, args.d, args.q + r * args.q_stride, args.q_stride, dots);
      });
      for (int64_t j = 0; j < count; ++j) {
        const float* added = args.added == nullptr ? nullptr : args.added[r + j] + first;
        finish_scores<kBits>(dots[j], scales, minimums, args.q_sum[r + j], args.softcap, added,
                             keys, args.scores + (r + j) * args.stride + i * kTokens);
      }
    }
  }
}

inline void cache_scores(const CacheScoreArgs* args) {
  args->bits == 8 ? cache_scores_of<8>(*args) : cache_scores_of<4>(*args);
}

// The greatest of `count` scores, in whole blocks; a NaN among them shows in the sum.
inline float greatest_score(const float* scores, int64_t count) {
  float top[kTokens];
  for (int n = 0; n < kTokens; ++n) top[n] = -kInfinity;
  for (int64_t i = 0; i < count; i += kTokens) {
    for (int n = 0; n < kTokens; ++n) top[n] = larger(scores[i + n], top[n]);
  }
  float most = -kInfinity;
  for (int n = 0; n < kTokens; ++n) most = larger(top[n], most);
  return most;
}

// scores -> u = exp(score - top) * the value's scale, 0 where a key is hidden.              (K4)
template <int kBits>
inline CacheSums cache_softmax_of(const CacheSoftmaxArgs& args) {
  constexpr int64_t kPairs = kBits == 8 ? 1 : 2;
  const float most = greatest_score(args.scores, args.seen.count * kTokens);
  const float top = most == -kInfinity ? 0.f : most;
  float weights[kTokens] = {}, sums[kTokens] = {};
  for (int64_t i = 0; i < args.seen.count; ++i) {
    float scales[kTokens], minimums[kTokens];
    scales_of_block<kBits>(args.scale + args.seen.stored[i] * kTokens * kPairs, scales, minimums);
    float* scores = args.scores + i * kTokens;
    for (int n = 0; n < kTokens; ++n) {
      const float t = scores[n] - top, p = select(t < -80.f, 0.f, exp_of(t));
      const float u = p * scales[n];
      weights[n] = weights[n] + p;
      if constexpr (kBits == 4) {
        const float m = p * minimums[n];
        sums[n] = sums[n] + select(scores[n] == -kInfinity, 0.f, m);
      }
      scores[n] = select(scores[n] == -kInfinity, 0.f, u);
    }
  }
  return {total(weights), total(sums)};
}

inline CacheSums cache_softmax(const CacheSoftmaxArgs* args) {
  return args->bits == 8 ? cache_softmax_of<8>(*args) : cache_softmax_of<4>(*args);
}

}  // namespace
}  // namespace qfx::cpu
