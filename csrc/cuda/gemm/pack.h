// pack_weight and unpack_weight on a GPU: layout.h.
#pragma once

#include "cuda/core/stream.h"
#include "cuda/gemm/layout.h"

namespace qfx::cuda {

// Packs the codes w[n * stride_n + k * stride_k] and their sums.
void pack_weight(const int8_t* w, int64_t stride_n, int64_t stride_k, const WeightLayout& layout,
                 int8_t* packed, Stream stream);

// w[N][K].
void unpack_weight(const PackedWeight& packed, int8_t* w, Stream stream);

// The 32-bit words to[i] = from[i]: scales and zero points, into a packed weight or out of it.
void copy_words(const void* from, int64_t count, void* to, Stream stream);

}  // namespace qfx::cuda
