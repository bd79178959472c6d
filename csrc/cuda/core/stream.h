// A CUDA stream for code that needs no CUDA header: the same type as cudaStream_t.
#pragma once

struct CUstream_st;

namespace qfx::cuda {

using Stream = CUstream_st*;

}  // namespace qfx::cuda
