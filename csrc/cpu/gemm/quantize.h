// Rows of floats, transformed (R1) -> int8 codes with a scale and a zero point: (Q1) to (Q4), (Q6).
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {

// A matrix of floats whose rows are contiguous: x[m][k]. Its rows are meant transformed.
struct FloatMatrix {
  const void* data;
  Dtype dtype;
  int64_t rows, columns;
  int64_t stride = columns;  // from row to row
  Transform transform = {};

  const void* row(int64_t m) const {
    const int64_t bytes = dtype == Dtype::kFloat32 ? 4 : 2;
    return static_cast<const char*>(data) + m * stride * bytes;
  }

  // Rows first, first + 1, ...
  FloatMatrix part(int64_t first, int64_t count) const {
    return {row(first), dtype, count, columns, stride, transform};
  }
};

// Row m in float32: x itself, or memory of the calling thread that the next call overwrites. Where
// `range` is not null it becomes that of the row.
const float* row_as_floats(const Kernels& kernels, const FloatMatrix& x, int64_t m,
                           Range* range = nullptr);

// All rows in float32, zero padded to `stride`, in memory of the calling thread that the next call
// overwrites.
const float* padded_floats(const Kernels& kernels, const FloatMatrix& x, int64_t stride);

// How numbers of this range become codes.
RowCode code_of(const Range& range, const CodeSpec& spec);

// How row m becomes codes under a per-row scheme.
RowCode choose_row_code(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                        int64_t m);

// One code for all rows of a matrix but those with a NaN or an infinity. (Q4)
struct TensorCode {
  RowCode code;
  const float* scales;  // one for each row: the code's, or the NaN or infinity in it

  RowCode of(int64_t m) const;
  TensorCode part(int64_t first) const { return {code, scales + first}; }
};

// Rows first, first + 1, ... of a number up to kRowsAtOnce: q[r * stride + k], and codes[r] says
// how they were made: as `spec` chooses from the row, or as `shared` says.
inline constexpr int kRowsAtOnce = 8;  // scales are chosen before rows are quantized: they overlap
void quantize_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                   const TensorCode* shared, int64_t first, int64_t count, RowCode* codes,
                   int8_t* q, int64_t stride);

// Row m, of whose groups of K each has a code of its own.
void quantize_row_in_groups(const Kernels& kernels, const FloatMatrix& x, int64_t m,
                            const CodeSpec& spec, int64_t group, const GroupCodes& to);

// The code of a per-tensor scheme; the scales of x's rows go to scales[m].
TensorCode choose_tensor_code(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                              float* scales);

// Codes [M, K] of a matrix, and a scale and a zero point for each row, or for each group of K of
// it.
struct MatrixCodes {
  int8_t* q;
  float* scale;
  int32_t* zero;
};

// `group`: elements of K that share a scale, or 0. Several threads share the rows.
void quantize_matrix(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                     int64_t group, const MatrixCodes& to);

// How a finite row becomes codes under a scale and a zero point that are given. (Q6)
RowCode given_code(const CodeSpec& spec, float scale, int32_t zero_point);

// The same for a row of this range, which may be faulty.
RowCode given_row_code(const Range& range, const CodeSpec& spec, float scale, int32_t zero_point);

// q[columns] of row m.
void quantize_row_of(const Kernels& kernels, const FloatMatrix& x, int64_t m, const RowCode& code,
                     int8_t* q);

}  // namespace qfx::cpu
