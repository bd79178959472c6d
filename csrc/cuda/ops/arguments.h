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

// The layout of a packed weight for activations with k columns and n outputs.
WeightLayout layout_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k, int64_t n);

// The same for w_scale [N, G], a column for each group: G tells groups apart where the size alone
// does not.
WeightLayout grouped_layout_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k,
                               const Tensor& w_scale);

// Opens a packed weight, which must be aligned.
PackedWeight packed_of(const WeightLayout& layout, const Tensor& packed);

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
