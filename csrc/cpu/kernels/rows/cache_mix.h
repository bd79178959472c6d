// Weighted sums of the values of a cache, for a few rows of weights. (K5)
#pragma once

#include "cpu/kernels/rows/cache_codes.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int64_t kRun = 4;  // blocks whose sums stay in registers

inline int64_t in_blocks(int64_t n) { return (n + kTokens - 1) / kTokens * kTokens; }

// The last codes of a row, zero padded.
inline void load_rest(const uint8_t* codes, int64_t count, uint8_t* out) {
  for (int i = 0; i < kFloats; ++i) out[i] = i < count ? codes[i] : 0;
}

// One or, in 4 bits, two vectors of values; `count` codes where they are fewer than kFloats.
template <int kBits, bool kRest>
inline void values_at(const uint8_t* codes, int64_t count, Floats* x) {
  uint8_t rest[kFloats];
  if constexpr (kRest) {
    load_rest(codes, count, rest);
    codes = rest;
  }
  if constexpr (kBits == 8) {
    x[0] = signed_codes(codes);
  } else {
    halves(codes, x, x + 1);
  }
}

// Tokens that lie side by side, and rows of weights for them.
struct Run {
  const uint8_t* codes;
  int64_t bytes, tokens;  // of a token; how many of them
  const float* u;
  int64_t stride;
};

// y[r][half][..] += u[r][n] * value n, in the order of n, for kVectors * kFloats bytes of a token.
template <int kRows, int kVectors, int kBits, bool kRest>
inline void mix_bytes(const Run& run, int64_t first, int64_t count, float* y, int64_t y_stride,
                      int64_t half) {
  constexpr int kHalves = kBits == 8 ? 1 : 2;
  Floats s[kRows][kVectors][kHalves];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      for (int h = 0; h < kHalves; ++h) {
        s[r][v][h] = load(y + r * y_stride + h * half + first + v * kFloats);
      }
    }
  }
  const uint8_t* codes = run.codes + first;
  for (int64_t n = 0; n < run.tokens; ++n, codes += run.bytes) {
    fetch_ahead(codes);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats x[kHalves];
      values_at<kBits, kRest>(codes + v * kFloats, count, x);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats u = all_of(run.u[r * run.stride + n]);
        for (int h = 0; h < kHalves; ++h) s[r][v][h] = multiply_add(u, x[h], s[r][v][h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      for (int h = 0; h < kHalves; ++h) {
        float* to = y + r * y_stride + h * half + first + v * kFloats;
        __builtin_memcpy(to, &s[r][v][h], sizeof(Floats));
      }
    }
  }
}

template <int kRows, int kBits>
inline void mix_run(const Run& run, float* y, int64_t y_stride, int64_t half) {
  constexpr int kMost = kRows * 4 <= kRoom ? 4 : 2, kWide = kBits == 8 ? kMost : kMost / 2;
  int64_t i = 0;
  for (; i + kWide * kFloats <= run.bytes; i += kWide * kFloats) {
    mix_bytes<kRows, kWide, kBits, false>(run, i, kFloats, y, y_stride, half);
  }
  for (; i + kFloats <= run.bytes; i += kFloats) {
    mix_bytes<kRows, 1, kBits, false>(run, i, kFloats, y, y_stride, half);
  }
  if (i < run.bytes) mix_bytes<kRows, 1, kBits, true>(run, i, run.bytes - i, y, y_stride, half);
}

// Blocks from the i-th on that lie side by side, kRun of them at most.
inline int64_t run_of(const SeenBlocks& seen, int64_t i) {
  int64_t count = 1;
  const int64_t* stored = seen.stored + i;
  while (count < kRun && i + count < seen.count && stored[count] == stored[0] + count) {
    ++count;
  }
  return count;
}

// The sums of a row in the order of features, plus the minimums, over the weights.          (K5)
inline void finish_mix(const CacheMixArgs& args, const CacheSums& sums, const float* from,
                       int64_t half, float* y) {
  const float inverse = sums.weights == 0.f ? 0.f : 1.f / sums.weights;
  const int64_t split = args.bits == 8 ? args.e : args.e / 2;
  for (int64_t i = 0; i < args.e; ++i) {
    const float sum = from[i < split ? i : half + i - split];
    y[i] = (args.bits == 8 ? sum : sum + sums.minimums) * inverse;
  }
}

template <int kBits>
inline void cache_mix_of(const CacheMixArgs& args) {
  const int64_t bytes = args.e * kBits / 8, half = in_blocks(bytes);
  const int64_t width = args.y_stride;
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < 2 * half; ++i) args.work[r * width + i] = 0.f;
  }
  for (int64_t i = 0, blocks; i < args.seen.count; i += blocks) {
    blocks = run_of(args.seen, i);
    const uint8_t* codes = args.codes + args.seen.stored[i] * kTokens * bytes;
    for (int64_t r = 0, count; r < args.rows; r += count) {
      count = rows_at_once(args.rows - r);
      const Run run = {codes, bytes, blocks * kTokens, args.u + r * args.stride + i * kTokens,
                       args.stride};
      by_rows(count,
              [&]<int kRows>() { mix_run<kRows, kBits>(run, args.work + r * width, width, half); });
    }
  }
  for (int64_t r = 0; r < args.rows; ++r) {
    finish_mix(args, args.sums[r], args.work + r * width, half, args.y + r * width);
  }
}

inline void cache_mix(const CacheMixArgs* args) {
  args->bits == 8 ? cache_mix_of<8>(*args) : cache_mix_of<4>(*args);
}

}  // namespace
}  // namespace qfx::cpu
