// Attention: codes of its operands, masks, softmax between its two products and its gradient, and a
// few queries in float.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/cache.h"
#include "cpu/kernels/tables/panel.h"
#include "types.h"

namespace qfx::cpu {

using qfx::Dtype;

// Rows of floats, 32 or fewer, that become symmetric codes; see rows/panel_codes.h. Np: columns in
// whole panels.
struct PanelCodesArgs {
  const void* x;
  Dtype dtype;
  int64_t stride;  // bytes from row to row
  int64_t rows, columns;
  const float* center;  // [Np], taken off first, zero padded; or null
  int rotation;
  float* floats;  // [rows][Np], to work in
  int8_t* codes;  // [rows][Np], each plus `offset`; zero from there to `padded`, whole panels too
  int64_t code_stride, padded;
  uint8_t offset;
  float* scale;  // [rows], NaN or infinity where the row holds one: its codes are 0
};

// Rows of floats y, padded to whole panels, that become rows of outputs, one after the other.
struct FinishArgs {
  float* y;  // overwritten
  int64_t stride, rows, columns;
  int rotation;  // turned back by this
  Dtype dtype;
  void* out;
};

// Panels of attention scores: out[r * stride + n], n counted through all of them, from
// raw[panel][r][32] of kPanelsScored panels or fewer, see rows/softmax_plain.h; or from tiles of
// Format::scores, which read neither raw, add, first, keys nor mask.
inline constexpr int kPanelsScored = 4;
struct ScoreArgs {
  const int32_t* raw;
  int64_t rows, panels;
  const int32_t* add;      // [rows]
  int32_t mul;             // of all rows: their codes are symmetric
  const float* row_scale;  // [rows]
  const float* key_scale;  // [32 panels]
  const int32_t* colsum;   // [32 panels]
  int64_t first;           // the first key of these panels
  const int64_t* keys;  // [rows], counted from key 0: those that count; panels beyond are skipped
  const float* const* mask;  // [rows], from key 0, minus infinity where a key is not seen; or null
  float* out;
  int64_t stride;
  float* top;  // [rows][32], the greatest score so far is the greatest of these
};

// A row of attention scores, which become weights times the values' scales.
struct SoftmaxArgs {
  float* scores;                   // [width]
  int64_t width, keys;             // width: whole panels; keys: the first of them that count
  float greatest;                  // score
  const float* value_scale;        // [width]
  const float* minimum = nullptr;  // [width], of the values, or null
};

// The sum of the weights, the greatest product of a weight and a scale, and the sum of the weights
// times the minimums.
struct SoftmaxSums {
  float sum, top, minimums;
};

// A row of weights of attention, [width], and the products of the gradient of its output with the
// values, which become the gradients of the scores: w (y - inverse sum w y), 0 where w is 0. (A12)
struct ScoreGradientArgs {
  const float* weights;
  float* products;
  int64_t width;  // whole panels
  float inverse;  // of the sum of the weights, 0 where that is
};

// A panel of attention's outputs, from the tiles of both bytes of the probabilities:
// out[r * stride + n], n < 32.
struct MixArgs {
  const int32_t *high, *low;  // [rows][32]
  int64_t rows;
  const int32_t *add_high, *add_low;  // [rows]
  int32_t mul;
  const int32_t* colsum;  // [32]
  const float* factor;    // [rows]
  float* out;
  int64_t stride;
};

struct AttentionKernels {
  void (*codes_of_panel)(const PanelCodesArgs* args);
  void (*mask_of_floats)(const float* b, int64_t keys, float* out);
  void (*mask_of_bools)(const uint8_t* b, int64_t keys, float* out);
  void (*interleave_keys)(const int8_t* codes, int64_t stride, int64_t groups, int8_t* out,
                          int32_t* sums);
  void (*interleave_values)(const int8_t* codes, int64_t stride, int8_t* out, int32_t* sums);
  void (*score)(const ScoreArgs* args);
  void (*greatest)(const float* top, int64_t rows, float* out);  // of each 32
  SoftmaxSums (*softmax)(const SoftmaxArgs* args);
  void (*probabilities)(const float* u, int64_t width, float factor, uint8_t offset, uint8_t* high,
                        uint8_t* low);
  void (*mix)(const MixArgs* args);
  void (*finish_rows)(const FinishArgs* args);
  void (*score_gradient)(const ScoreGradientArgs* args);
  void (*score_keys)(const float* q, const float* k, int64_t stride, int64_t keys, int64_t d,
                     float scale, float* scores);
  float (*exponentials)(float* scores, int64_t keys, float top);
  void (*mix_values)(const float* p, const float* v, int64_t stride, int64_t keys, int64_t e,
                     float* y);
  CacheKernels cache;
};

}  // namespace qfx::cpu
