// Codes: two warpgroups share a tile, two blocks of a cluster the right operand.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(s8_128x256x2, CodeTerms, CodeSums)

}  // namespace qfx::cuda::sm90
