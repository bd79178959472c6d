// Bits: two warpgroups share a tile.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(b1_128x256, SignTerms, SignSums)

}  // namespace qfx::cuda::sm90
