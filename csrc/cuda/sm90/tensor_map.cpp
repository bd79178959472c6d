#include "cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>
#include <torch/headeronly/util/Exception.h>

#include "cuda/sm90/config.h"

namespace qfx::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver by way of the runtime, so that nothing is linked to the driver.
Encode find_encode() {
  constexpr unsigned kSince = 12000;  // the CUDA version whose signature this is
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kSince, cudaEnableDefault, &found);
  STD_TORCH_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess,
                  "the CUDA driver has no cuTensorMapEncodeTiled (error ", static_cast<int>(error),
                  ", query result ", static_cast<int>(found),
                  "); the Hopper kernels need a driver of CUDA 12.0 or later. "
                  "QFX_CUDA_KERNEL=portable does without them");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap tile_map(const TileSource& from, int tile_rows) {
  static const Encode encode = find_encode();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(from.k_bytes),
                               static_cast<cuuint64_t>(from.rows),
                               static_cast<cuuint64_t>(from.matrices)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(from.pitch),
                                 static_cast<cuuint64_t>(from.step)};
  const cuuint32_t box[3] = {kTileBytes, static_cast<cuuint32_t>(tile_rows), 1};
  const cuuint32_t every_element[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(from.data), sizes, strides,
             box, every_element, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused (error ",
                  static_cast<int>(result), ") tiles of ", tile_rows, " rows of ", from.matrices,
                  " matrices, ", from.step, " bytes apart, of ", from.rows, " rows of ",
                  from.k_bytes, " bytes, ", from.pitch, " bytes apart, at address ",
                  reinterpret_cast<uintptr_t>(from.data));
  return map;
}

}  // namespace qfx::cuda::sm90
