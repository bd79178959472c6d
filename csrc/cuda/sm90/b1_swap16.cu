// Bits: 64 output features by 16 tokens.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(b1_swap16, SignTerms, SignSums)

}  // namespace qfx::cuda::sm90
