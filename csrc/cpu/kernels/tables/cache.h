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

inline constexpr int kQuad = 64;   // tokens that are unpacked at a time: four blocks, two panels
inline constexpr int kPart = 512;  // tokens of a part, whose scores have one greatest (K4)

// A quad of keys or of values as panels, see pack.h. Keys: two panels of 32 tokens, `stride` bytes
// apart. Values: panels of 32 features, `stride` bytes apart, of which the tokens are 16 groups.
struct CachePanelsArgs {
  const uint8_t* const* blocks;  // [4], where the codes of 16 tokens lie; null for zeros
  int bits;
  int64_t features, stride;
  int8_t* out;
  int32_t* sums;  // of the codes: keys [64], values [2][Ep], of 32 tokens each
  int8_t* rows;   // [32][Ep], to work in, for values
};

// The same for a few rows of unsigned bytes, code + 128, without panels. Keys: sums of the codes
// too, and out[block / 2][rows][32]; values: out[feature / 32][rows][32].
struct CacheFewArgs {
  const uint8_t* const* blocks;  // as above
  int64_t count;
  int bits;
  int64_t features;
  const uint8_t* a;
  int64_t rows, lda;
  int32_t *out, *sums;
};

// What there is of that, for up to `rows` rows, two of each query; 0 where there is nothing.
// Words: a has one row of 16 bits of each query instead, `lda` in bytes: 256 h + l, of
// probabilities less 2^15, features in whole pairs. D and E are at most kMostWords.
inline constexpr int64_t kMostWords = 512;  // features of which a sum of 32 bits holds the products
struct CacheFewKernels {
  int rows = 0;
  bool words = false;
  void (*keys)(const CacheFewArgs* args) = nullptr;
  void (*values)(const CacheFewArgs* args) = nullptr;
};

// Scales of 16 tokens, in 4 bits with a minimum after each; null for zeros. A faulty key or value
// gets the key's scale NaN, and a value that is faulty or too small to matter the scale 0.
struct CacheScalesArgs {
  const float *keys, *values;
  int key_bits, value_bits;
  float *key_scale, *key_minimum, *value_scale, *value_minimum;
};

// Bytes of the numbers of 16 bits that queries and probabilities become, each a row of a product.
inline constexpr int kBytes = 2;

// A row of queries -> codes c = 256 h + l, h and l signed bytes plus `offset`.
struct CacheQueryArgs {
  const float* q;
  int64_t features;
  float inverse;  // of the scale
  uint8_t offset;
  uint8_t *high, *low;
};

// Panels of scores: out[r * stride + n], n counted through all of them, from the tiles of the
// bytes of the queries, raw[panel][2][rows][32]. (K3)
struct CacheScoreArgs {
  const int32_t* raw;
  int64_t rows, panels;
  const int32_t* add;  // [2][rows]
  int32_t mul;
  const int32_t* colsum;     // [32 panels]
  const float* row_scale;    // [rows]
  const float* key_scale;    // [32 panels]
  const float* row_sum;      // [rows], of the codes, times the scale
  const float* minimum;      // [32 panels], or null in 8 bits
  float softcap;             // scores lie between -softcap and softcap; 0 for any
  const float* const* mask;  // [rows], minus infinity where a key is not seen; each may be null
  float* out;
  int64_t stride;
  float* top;  // [rows][32], the greatest score so far is the greatest of these
};

// What a row knows of the keys so far, or of those of one part: the greatest score, the sum of the
// weights, and that of their products with the values' minimums.
struct CacheSums {
  float top, sum, minimums;
};

// Adds a part to what is known of the parts before: y[e] and its sums. (K5)
struct CacheMergeArgs {
  CacheSums part;
  const float* part_y;
  int64_t e;
  CacheSums* all;
  float* y;
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
  void (*key_panels)(const CachePanelsArgs* args);
  void (*value_panels)(const CachePanelsArgs* args);
  CacheFewKernels few;
  void (*scales)(const CacheScalesArgs* args);
  int32_t (*query)(const CacheQueryArgs* args);  // the sum of the codes
  void (*score)(const CacheScoreArgs* args);
  void (*merge)(const CacheMergeArgs* args);
  // Codes 0..15 of n numbers that are at least `minimum`.
  void (*nibbles)(const float* x, int64_t n, float minimum, float inverse, uint8_t* codes);
  void (*keys)(const CacheBlockArgs* args);
  void (*values)(const CacheBlockArgs* args);
};

}  // namespace qfx::cpu
