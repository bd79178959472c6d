// pack_weight and unpack_weight on a GPU: layout.h.
#pragma once

#include "cuda/core/stream.h"
#include "cuda/gemm/layout.h"

namespace qfx::cuda {

// Packs w[n * stride_n + k * stride_k].
void pack_weight(const int8_t* w, int64_t stride_n, int64_t stride_k, const WeightLayout& layout,
                 int8_t* packed, Stream stream);

// w[N][K].
void unpack_weight(const PackedWeight& packed, int8_t* w, Stream stream);

}  // namespace qfx::cuda
