// Codes: two warpgroups share a tile.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(s8_128x256, CodeTerms, CodeSums)

}  // namespace qfx::cuda::sm90
