// Rows of floats: conversion, range, rotation, and the codes that they become.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/depthwise.h"
#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/windows.h"
#include "types.h"

namespace qfx::cpu {

using qfx::CodeSpec;
using qfx::Dtype;
using qfx::Transform;

inline constexpr int kLargestRotation = 256;
inline constexpr int kRandomGroup = 64;  // elements whose random bits are made together

// Extremes of a row as sortable integers: `magnitude` is the bit pattern of max|x| (NaN above
// infinity above all finite), `low` and `high` bound the row and zero (see
// to_sortable in tables/code.h).
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

// A row whose groups of K have scales of their own: codes [K], and of each group [G].
struct GroupCodes {
  int8_t* q;
  float* scale;
  int32_t* zero_point;
};

// A row of a recurrent layer at one step: the products of its input and of its state, a part of
// `size` elements for each gate, and what becomes of the state. (L1) (L2)
struct CellRow {
  const float *x, *r;
  int64_t size;
  const float* before;  // the state, of a GRU
  float* c;             // of an LSTM, which is replaced
  Dtype dtype;
  void* h;  // the new state; may be `before`
};

struct RowKernels {
  void (*widen)(const void* x, Dtype dtype, int64_t n, float* out);
  void (*range)(const float* x, int64_t n, Range* range);
  // out = R (x * factor) and its range, or back: factor * (R^T x). `out` may be x.
  void (*rotate)(const float* x, int64_t n, const Transform* transform, float* out, Range* range);
  void (*rotate_back)(const float* x, int64_t n, const Transform* transform, float* out);
  void (*quantize)(const float* x, int64_t n, const RowCode* code, int8_t* q);
  void (*quantize_groups)(const float* x, int64_t n, int64_t group, const CodeSpec* spec,
                          const GroupCodes* to);
  void (*quantize_clamped)(const float* x, int64_t n, const RowCode* code, int8_t* q);
  void (*random)(uint64_t seed, int64_t first, int64_t groups, uint16_t* bits);
  void (*quantize_stochastic)(const float* x, int64_t n, const RowCode* code,
                              const uint16_t* random, int8_t* q);
  void (*range_of_columns)(const float* x, int64_t k, int32_t* magnitude);
  void (*quantize_columns)(const float* x, int64_t groups, const ColumnCodes* codes, int8_t* out,
                           int32_t* colsum);
  void (*lstm)(const CellRow* row);
  void (*gru)(const CellRow* row);
  const WindowKernels* windows;
  const DepthwiseKernels* depthwise;
};

}  // namespace qfx::cpu
