// Reading arguments into the CUDA kernels' types, with checks.
#pragma once

#include <optional>
#include <vector>

#include "cuda/core/device.h"
#include "cuda/gemm/layout.h"
#include "cuda/rows/quantize.h"
#include "operands.h"

// The library that the operators belong to and the device they run for; tests have their own.
#if !defined(QFX_LIBRARY)
#define QFX_LIBRARY qfx
#define QFX_KEY CUDA
#endif

namespace qfx::cuda {

// The rows of x, transformed (R1); x and `factor` must be checked and contiguous.
FloatRows float_rows_of(const char* op, const Tensor& x, const Matrix& size,
                        const std::optional<Tensor>& factor = std::nullopt, int64_t rotation = 0);

// activation_code_of, where groups of K that have scales of their own are an error: they have no
// kernel.
ActivationCode row_code_of(const char* op, const std::vector<int64_t>& code);

// The layout of an int8 weight with one scale for each of its n rows and no zero points.
inline WeightLayoutArgument int8_rows(int64_t n) { return {n, 8, 0, 0, 0}; }

// Where an operator has kernels for weights of that layout alone.
void check_one_scale(const char* op, const WeightLayoutArgument& layout);

// The longest group with zero points is one whose int32 sum cannot overflow.
void check_sums(const char* op, const WeightLayout& layout);

// The bytes of an int8 weight for the k columns of x, as `layout` says they are.
WeightLayout weight_layout_of(const char* op, const Tensor& weight,
                              const WeightLayoutArgument& layout, int64_t k);

// Opens a packed weight, which must be aligned.
PackedWeight packed_of(const WeightLayout& layout, const Tensor& weight);

// x itself or a copy, contiguous. A transposed matrix, as backward has it, is turned by tiles.
Tensor made_rows(const char* op, const Tensor& x, Stream stream);

// t itself, or a copy, contiguous and at an address that is a multiple of 16.
Tensor made_aligned(const Tensor& t);

// Uninitialized, on t's device.
Tensor empty_beside(const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype);

// Zeros, on t's device.
Tensor zeros_beside(const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype);
// Memory for the code that rows share, where the scheme has one.
struct SharedCode {
  std::optional<Tensor> memory;
  TensorCode code;
};
SharedCode shared_code_for(const Tensor& x, const CodeSpec& spec);

template <typename T>
T* data_of(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace qfx::cuda
