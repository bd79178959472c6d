// Bits: 64 output features by 64 tokens.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(b1_swap64, SignTerms, SignSums)

}  // namespace qfx::cuda::sm90
