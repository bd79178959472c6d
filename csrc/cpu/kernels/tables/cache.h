// A cache of keys and values in codes of 8 or 4 bits: attention that reads the codes. (K1) to (K5)
//
// Of one head, tokens in blocks of 16:
//     keys    codes[n / 16][byte][n % 16]: feature d is byte d, or in 4 bits half d % 2 of byte d /
//     2 values  codes[n][byte]: feature e is byte e, or in 4 bits byte e % (E / 2), its upper half
//             from E / 2 on
//     scales  scale[n], or in 4 bits scale[n][2], the scale and the minimum
// Codes of 8 bits are signed; those of 4 are 0..15, and the value code * scale + minimum.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

namespace qfx::cpu {

inline constexpr int kTokens = 16;  // of a block

// The blocks that some row sees. Scores of them stand one after the other.
struct SeenBlocks {
  const int32_t* at;      // which blocks of the sequence they are
  const int64_t* stored;  // where they lie, in blocks from the first of the head
  int64_t count;
  int64_t length;  // tokens from here on are hidden
};

// scores[r * stride + 16 i + n] = q[r] . key n of block i, capped, and what the mask adds; minus
// infinity where a key is hidden.
struct CacheScoreArgs {
  const uint8_t* codes;
  const float* scale;
  int bits;
  int64_t d;
  SeenBlocks seen;
  const float* q;  // [rows], q_stride apart, rotated and scaled
  int64_t q_stride;
  const float* q_sum;         // [rows], of the features
  const float* const* added;  // [rows], each as long as whole blocks; or null
  int64_t rows;
  float softcap;  // scores lie between -softcap and softcap; 0 for any
  float* scores;
  int64_t stride;
};

// A row of scores, which become weights times the values' scales.
struct CacheSoftmaxArgs {
  float* scores;
  const float* scale;  // of the values
  int bits;
  SeenBlocks seen;
};

// The sum of the weights, and that of their products with the minimums.
struct CacheSums {
  float weights, minimums;
};

// y[r][e] = (sum of u[r][n] code[n][e] + the minimums) / the weights.
struct CacheMixArgs {
  const uint8_t* codes;
  int bits;
  int64_t e;
  SeenBlocks seen;
  const float* u;  // [rows], stride apart
  int64_t stride;
  const CacheSums* sums;  // [rows]
  int64_t rows;
  float *work, *y;  // [rows], y_stride apart, which is twice e at least, in whole panels
  int64_t y_stride;
};

// A block of tokens in floats, out[n * d + i].
struct CacheBlockArgs {
  const uint8_t* codes;
  const float* scale;
  int bits;
  int64_t d;
  float* out;
};

struct CacheKernels {
  void (*score)(const CacheScoreArgs* args);
  CacheSums (*softmax)(const CacheSoftmaxArgs* args);
  void (*mix)(const CacheMixArgs* args);
  // Codes 0..15 of n numbers that are at least `minimum`.
  void (*nibbles)(const float* x, int64_t n, float minimum, float inverse, uint8_t* codes);
  void (*keys)(const CacheBlockArgs* args);
  void (*values)(const CacheBlockArgs* args);
};

}  // namespace qfx::cpu
