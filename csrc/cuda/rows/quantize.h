// Rows of floats, transformed (R1) -> int8 codes with a scale and a zero point, on a GPU: (Q1) to
// (Q7). All memory is the GPU's; the work is put into the stream.
#pragma once

#include <cstdint>

#include "cuda/core/stream.h"
#include "types.h"

namespace qfx::cuda {

// Contiguous rows x[m][k]; meant transformed.
struct FloatRows {
  const void* data;
  Dtype dtype;
  int64_t rows, columns;
  Transform transform = {};
};

// Memory for the code that finite rows share in a per-tensor scheme: [1] each, else not needed.
struct TensorCode {
  float* scale;
  int32_t* zero_point;
};

struct Codes {
  int8_t* q;            // [rows][columns]
  float* scale;         // [rows]
  int32_t* zero_point;  // [rows]
  TensorCode shared;
};

// A scale and a zero point for each row, or one for all with a step of 0. No zero points: 0.
struct GivenCode {
  const float* scale;
  int64_t scale_step;
  const int32_t* zero_point;
  int64_t zero_step;
};

void quantize(const FloatRows& x, const CodeSpec& spec, const Codes& out, Stream stream);
void quantize_static(const FloatRows& x, const CodeSpec& spec, const GivenCode& given,
                     const Codes& out, Stream stream);
void quantize_stochastic(const FloatRows& x, const CodeSpec& spec, const int64_t* seed,
                         const Codes& out, Stream stream);

// What the codes of x stand for, (Q5), in y[rows][columns].
void fake_quantize(const FloatRows& x, const CodeSpec& spec, const TensorCode& shared, Dtype dtype,
                   void* y, Stream stream);

// The scale and the zero point of the finite rows of a matrix under a per-tensor scheme.
void choose_tensor_code(const FloatRows& x, const CodeSpec& spec, const TensorCode& to,
                        Stream stream);

// R (x * factor), or factor * (R^T x), in x's type.
void rotate(const FloatRows& x, bool back, void* y, Stream stream);

}  // namespace qfx::cuda
