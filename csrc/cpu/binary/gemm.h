// The 1-bit GEMM: sum[m][n] = sum_k sign(x[m][k]) sign(w[n][k]), handed on tile by tile. (H1)
#pragma once

#include "cpu/binary/pack.h"
#include "cpu/core/isa.h"
#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// The best kernels for an instruction set that this processor has.
const BinaryKernels& binary_kernels_of(Isa isa);

// Signs of activations in the operand format of an instruction set.
struct BitRows {
  uint8_t* a;
  int64_t count;
  int64_t stride;  // from one row group to the next
};

// How many rows to arrange at a time: whole row blocks, about 16 MB of them.
int64_t bit_rows_at_once(const BinaryKernels& kernels, const PackedBits& w);

// The signs of x in memory of the calling thread, reused between calls. If row_scale is given,
// row_scale[m] becomes 1, or NaN for a row that holds a NaN.
BitRows signs_of(const BinaryKernels& kernels, const PackedBits& w, const FloatMatrix& x,
                 float* row_scale);

// Tiles that the sink receives hold sum - K.
void binary_gemm(const BinaryKernels& kernels, const BitRows& rows, const PackedBits& w,
                 const TileSink& sink);

}  // namespace qfx::cpu
