// Codes: two warpgroups take tiles in turns.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(s8_128x128, CodeTerms, CodeSums)

}  // namespace qfx::cuda::sm90
