// Bits: two warpgroups share a tile.
#include "cuda/gemm_sm90.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(b1_128x256, SignTerms, SignSums)

}  // namespace qfx::cuda::sm90
