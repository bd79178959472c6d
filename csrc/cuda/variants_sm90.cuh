// The Hopper kernels by name, and what a launch needs.
#pragma once

#include "cuda/choice.h"
#include "cuda/gemm.cuh"
#include "cuda/work_sm90.cuh"

namespace qfx::cuda::sm90 {

// int32s of memory, all 0, that a product in `splits` parts of K needs; 0 for one part.
int64_t workspace_size(const Config& config, const Sizes& size, int splits);

// raw[b][m][n] = sum_k a[b][m][k] w[b][n][k], finished by finish.cuh. `choice` is not "portable".
// Rows begin at multiples of 16 bytes.
void run(const Choice& choice, const Sizes& size, const Rows& a, const Rows& w,
         const CodeSums& sums, const Output& out, int32_t* workspace, int multiprocessors,
         Stream stream);
void run(const Choice& choice, const Sizes& size, const Rows& a, const Rows& w,
         const SignSums& sums, const Output& out, int32_t* workspace, int multiprocessors,
         Stream stream);

}  // namespace qfx::cuda::sm90
