// Bits: two warpgroups take tiles in turns.
#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {

QFX_SM90_KERNEL(b1_128x128, SignTerms, SignSums)

}  // namespace qfx::cuda::sm90
