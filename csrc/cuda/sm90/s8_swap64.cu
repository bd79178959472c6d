// Codes: 64 output features by 64 tokens.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(s8_swap64, CodeTerms, CodeSums)

}  // namespace qfx::cuda::sm90
