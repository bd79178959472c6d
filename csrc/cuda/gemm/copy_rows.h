// Matrices moved into rows. Those of codes are as tensor cores can read them: k contiguous, a pitch
// that is a multiple of 16, zeros after K.
#pragma once

#include <cstdint>

#include "cuda/core/stream.h"
#include "types.h"

namespace qfx::cuda {

// Matrices of codes, each of which begins `batch_step` after the last, each line of it `step`.
struct CodeLines {
  const int8_t* data;
  int64_t batch_step, step;
};

struct RowSizes {
  int64_t batch, rows, k, pitch;
};

// out[b][r][k] = in[b][r][k]: lines are rows.
void pad_codes(const CodeLines& in, const RowSizes& size, int8_t* out, Stream stream);

// out[b][r][k] = in[b][k][r]: what is contiguous along r becomes so along k.
void turn_codes(const CodeLines& in, const RowSizes& size, int8_t* out, Stream stream);

// out[r][c] = in[c * step + r], floats of any type.
void turn_floats(const void* in, Dtype dtype, int64_t step, int64_t rows, int64_t columns,
                 void* out, Stream stream);

// sums[b][r] = sum_k codes[b][r][k], `batch_step` apart.
void sum_codes(const CodeLines& codes, const RowSizes& size, int32_t* sums, Stream stream);

}  // namespace qfx::cuda
