// The functions every instruction set provides, and the table that names them.
//
// A row of activations is quantized to codes q[k], then arranged into an operand format of the
// instruction set, together with integer constants of the row such that
//     sum_k (q[k] - z) w[n][k] = tile[n] + row_add - row_mul * colsum[n]      (wrapping int32)
// with row_add returned by arrange and row_mul = z + mul_offset.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "types.h"

namespace qfx::cpu {

using qfx::Activation;
using qfx::CodeSpec;
using qfx::Dtype;
using qfx::Transform;

inline constexpr int kPanel = 32;      // columns of a weight panel
inline constexpr int kGroup = 4;       // consecutive k of one column that lie side by side
inline constexpr int kKMultiple = 64;  // K of a packed weight is padded to this
inline constexpr int kMaxTileRows = 32;
inline constexpr int kMaxBytesPerCode = 2;
inline constexpr int kAhead = 4096;  // bytes ahead of the weights that one row or two prefetch
inline constexpr int kLargestRotation = 64;
inline constexpr int kRandomGroup = 64;  // elements whose random bits are made together

// Extremes of a row as sortable integers: `magnitude` is the bit pattern of max|x| (NaN above
// infinity above all finite), `low` and `high` bound the row and zero (see rows.h, to_sortable).
struct Range {
  int32_t magnitude, low, high;
};

// How one row becomes codes: q = clamp(rne(x * inverse) + zero_point, qmin, qmax), 0 if !finite.
struct RowCode {
  float scale, inverse;
  int32_t zero_point, qmin, qmax;
  bool finite;
};

// How the columns of one panel become codes: q = clamp(rne(x * inverse), -qmax, qmax) & finite.
struct ColumnCodes {
  float inverse[kPanel];
  int32_t finite[kPanel];  // -1 or 0
  int32_t qmax;
};

// The float parameters of one panel of columns, [32] each, zero padded.
struct Panel {
  float scale[kPanel], bias[kPanel];
  int32_t colsum[kPanel];
  bool has_bias;
};

// The same where the sums are floats, as float activations times int8 weights give them.
struct FloatPanel {
  float scale[kPanel], bias[kPanel];
  bool has_bias;
};

// Rows of floats, 32 or fewer, that become symmetric codes; see panel_codes.h. Np: columns in whole
// panels.
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

// Rows of floats y, padded to whole panels, that become rows of outputs, one behind the other.
struct FinishArgs {
  float* y;  // overwritten
  int64_t stride, rows, columns;
  int rotation;  // turned back by this
  Dtype dtype;
  void* out;
};

// A panel of attention scores: out[r * stride + n] from raw[r][n], n < 32; see softmax.h.
struct ScoreArgs {
  const int32_t* raw;  // [rows][32]
  int64_t rows;
  const int32_t* add;      // [rows]
  int32_t mul;             // of all rows: their codes are symmetric
  const float* row_scale;  // [rows]
  const float* key_scale;  // [32]
  const int32_t* colsum;   // [32]
  float* out;
  int64_t stride;
};

// A row of attention scores, which become weights times the values' scales.
struct SoftmaxArgs {
  float* scores;             // [width]
  int64_t width, keys;       // width: whole panels; keys: the first of them that count
  const float* mask;         // [width], minus infinity where a key is not seen; or null
  const float* value_scale;  // [width]
};

// The sum of the weights, and the greatest product of a weight and a scale.
struct SoftmaxSums {
  float sum, top;
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

// Rows of an int32 tile [rows][32] -> out[m * ldo + n], n < columns. (E1)
struct EpilogueArgs {
  const int32_t* tile;
  int rows, columns;
  const int32_t *row_add, *row_mul;
  const float* row_scale;
  int64_t scale_stride;  // 1: one scale per row, 0: one for all
  const Panel* panel;
  Activation activation;
  Dtype dtype;
  void* out;
  int64_t ldo;
};

// Rows of float sums [rows][32] -> out[m * ldo + n], n < columns:
//     act(sums * (row_scale * scale) + bias)
struct FloatEpilogueArgs {
  const float* sums;
  int rows, columns;
  const float* row_scale;
  int64_t scale_stride;  // 1: one scale per row, 0: one for all
  const FloatPanel* panel;
  Activation activation;
  Dtype dtype;
  void* out;
  int64_t ldo;
};

// Rows of the products of `groups` groups of K, which have a scale of the weight each, and a zero
// point: from raw sums to sums of floats. See groups.h. (E3)
struct GroupArgs {
  const int32_t* raw;  // [groups][rows][32]
  int64_t groups;
  int rows;
  const int32_t *row_add, *row_sum;  // of group g and row m at [g * row_step + m]
  int64_t row_step;
  const int32_t* row_mul;  // [rows]
  const int32_t* colsum;   // [groups][32]
  const float* scale;      // of group g and column n at [g * scale_step + n]
  int64_t scale_step;
  const int32_t* zero;  // the same with zero_step, or null
  int64_t zero_step;
  float* sums;  // [rows][32], added to
};

// tile[r][n] (+)= sum_k a[r][k] b[k][n] over `groups` groups of 4 k, n < 32. A prefetching tile
// asks for as many bytes from `ahead` on as it reads from b; they need not be there.
using TileFn = void (*)(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                        const int8_t* ahead, int32_t* tile, bool accumulate);

// What is known of the codes of a product. Narrow weights lie in [-64, 64], narrow activations in
// [-64, 63]: every product of 7 bits or fewer.
enum class Operands : int { kWide, kNarrowWeight, kNarrowCodes, kNarrow };
inline constexpr int kOperandKinds = 4;

// An operand format of activations and the tiles that read it.
struct Format {
  const char* name;     // bits of activations and weights that it is exact for: s8s8, s7s8, ...
  int tile_rows;        // the tallest tile
  int bytes_per_code;   // of an arranged row; 1: it is the codes plus mul_offset
  int k_multiple;       // rows are padded to this with what adds nothing; divides kKMultiple
  int32_t mul_offset;   // see above
  const TileFn* tiles;  // tiles[r - 1] handles r rows
  const TileFn* prefetching_tiles;
  int32_t (*arrange)(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a);
  // What a thread calls behind its last tile, to give back what tiles set up. Null if nothing.
  void (*release)() = nullptr;
  // Multiply-accumulates of `rounds` rounds of the multiply instructions alone, from registers: the
  // ceiling that benchmarks quote. Null where there is none to speak of.
  int64_t (*multiply)(int64_t rounds) = nullptr;
  // What to use instead for fewer than minimum_rows rows, or null.
  int64_t minimum_rows = 0;
  const Format* below = nullptr;
};

// Functions on rows of floats, the epilogue among them.
struct RowKernels {
  void (*widen)(const void* x, Dtype dtype, int64_t n, float* out);
  void (*range)(const float* x, int64_t n, Range* range);
  // out = R (x * factor) and its range, or back: factor * (R^T x). `out` may be x.
  void (*rotate)(const float* x, int64_t n, const Transform* transform, float* out, Range* range);
  void (*rotate_back)(const float* x, int64_t n, const Transform* transform, float* out);
  void (*quantize)(const float* x, int64_t n, const RowCode* code, int8_t* q);
  void (*quantize_clamped)(const float* x, int64_t n, const RowCode* code, int8_t* q);
  void (*random)(uint64_t seed, int64_t first, int64_t groups, uint16_t* bits);
  void (*quantize_stochastic)(const float* x, int64_t n, const RowCode* code,
                              const uint16_t* random, int8_t* q);
  void (*range_of_columns)(const float* x, int64_t k, int32_t* magnitude);
  void (*quantize_columns)(const float* x, int64_t groups, const ColumnCodes* codes, int8_t* out,
                           int32_t* colsum);
  void (*epilogue)(const EpilogueArgs* args);
  void (*add_groups)(const GroupArgs* args);
  void (*codes_of_panel)(const PanelCodesArgs* args);
  void (*mask_of_floats)(const float* b, int64_t keys, float* out);
  void (*mask_of_bools)(const uint8_t* b, int64_t keys, float* out);
  void (*interleave_keys)(const int8_t* codes, int64_t stride, int64_t groups, int8_t* out,
                          int32_t* sums);
  void (*interleave_values)(const int8_t* codes, int64_t stride, int8_t* out, int32_t* sums);
  void (*score)(const ScoreArgs* args);
  SoftmaxSums (*softmax)(const SoftmaxArgs* args);
  void (*probabilities)(const float* u, int64_t width, float factor, uint8_t offset, uint8_t* high,
                        uint8_t* low);
  void (*mix)(const MixArgs* args);
  void (*finish_rows)(const FinishArgs* args);
  void (*weight_only)(const float* x, const int8_t* b, int64_t groups, float* sums);
  void (*finish_floats)(const FloatEpilogueArgs* args);
  void (*score_keys)(const float* q, const float* k, int64_t stride, int64_t keys, int64_t d,
                     float scale, float* scores);
  float (*exponentials)(float* scores, int64_t keys, float top);
  void (*mix_values)(const float* p, const float* v, int64_t stride, int64_t keys, int64_t e,
                     float* y);
};

struct Kernels {
  const char* isa;
  const RowKernels* row;
  const Format* formats[kOperandKinds];  // by Operands; the same one where there is nothing faster
};

const RowKernels& row_kernels_ref();
#if defined(__x86_64__)
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();
#endif
#if defined(__aarch64__)
const RowKernels& row_kernels_neon();
#endif

#define QFX_ISA(isa, name) const Kernels& kernels_##name();
#include "cpu/core/isas.inc"
#undef QFX_ISA

}  // namespace qfx::cpu
