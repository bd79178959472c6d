// pack_weight and unpack_weight: layout.h. A warp has a row.
#include "cuda/core/ptx.cuh"
#include "cuda/gemm/pack.h"

namespace qfx::cuda {
namespace {

constexpr int kWarp = 32, kRowsPerBlock = 8;
constexpr int kQuad = 4;  // codes that a thread writes at once
constexpr int kCopyThreads = 256;

__device__ __forceinline__ int64_t row_of_warp() {
  return int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
}

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }

__device__ __forceinline__ int sum_of_warp(int sum) {
#pragma unroll
  for (int i = kWarp / 2; i > 0; i /= 2) sum += __shfl_xor_sync(kAllLanes, sum, i);
  return sum;
}

// Codes k..k + 3 of a row, zero from `end` on.
__device__ __forceinline__ int quad_of(const int8_t* row, int64_t stride, int64_t k, int64_t end) {
  const bool aligned = (reinterpret_cast<uintptr_t>(row + k) % kQuad) == 0;
  if (stride == 1 && aligned && k + kQuad <= end)
    return load_once(reinterpret_cast<const int*>(row + k));
  unsigned quad = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const int code = k + i < end ? row[(k + i) * stride] : 0;
    quad |= (static_cast<unsigned>(code) & 0xff) << 8 * i;
  }
  return static_cast<int>(quad);
}

__global__ void __launch_bounds__(kRowsPerBlock* kWarp)
    pack_rows(const int8_t* w, int64_t stride_n, int64_t stride_k, WeightLayout layout,
              int8_t* packed) {
  const int64_t n = row_of_warp();
  if (n >= layout.n) return;
  constexpr int kOnes = 0x01010101;
  const int8_t* row = w + n * stride_n;
  int* to = reinterpret_cast<int*>(packed + layout.weights_at() + n * layout.pitch());
  int32_t* sums = reinterpret_cast<int32_t*>(packed + layout.group_sums_at());
  const int64_t step = layout.group == 0 ? layout.pitch() : layout.group;
  int total = 0;
  for (int64_t begin = 0; begin < layout.pitch(); begin += step) {
    int sum = 0;
    const int64_t end = min(begin + step, layout.pitch());
    for (int64_t k = begin + lane_of_warp() * kQuad; k < end; k += kWarp * kQuad) {
      const int quad = quad_of(row, stride_k, k, layout.k);
      to[k / kQuad] = quad;
      sum = __dp4a(quad, kOnes, sum);
    }
    sum = sum_of_warp(sum);
    total += sum;
    if (layout.group != 0 && lane_of_warp() == 0) sums[n * layout.groups() + begin / step] = sum;
  }
  if (lane_of_warp() == 0) reinterpret_cast<int32_t*>(packed)[n] = total;
}

// The padding of the column sums and the zeros before the scales.
__global__ void write_padding(WeightLayout layout, int8_t* packed) {
  int32_t* colsum = reinterpret_cast<int32_t*>(packed);
  for (int64_t n = layout.n + threadIdx.x; n < layout.weights_at() / 4; n += blockDim.x) {
    colsum[n] = 0;
  }
  for (int64_t i = layout.tail_at() + threadIdx.x; i < layout.scale_at(); i += blockDim.x) {
    packed[i] = 0;
  }
}

__global__ void __launch_bounds__(kRowsPerBlock* kWarp)
    unpack_rows(const int8_t* rows, WeightLayout layout, int8_t* w) {
  const int64_t n = row_of_warp();
  if (n >= layout.n) return;
  for (int64_t k = lane_of_warp(); k < layout.k; k += kWarp) {
    w[n * layout.k + k] = rows[n * layout.pitch() + k];
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    copy(const uint32_t* from, int64_t count, uint32_t* to) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
}

dim3 blocks_for(int64_t count, int64_t in_block) {
  return dim3(static_cast<unsigned>((count + in_block - 1) / in_block));
}

}  // namespace

void pack_weight(const int8_t* w, int64_t stride_n, int64_t stride_k, const WeightLayout& layout,
                 int8_t* packed, Stream stream) {
  launch(write_padding, 1, 256, 0, stream, layout, packed);
  if (layout.n == 0) return;
  launch(pack_rows, blocks_for(layout.n, kRowsPerBlock), kRowsPerBlock * kWarp, 0, stream, w,
         stride_n, stride_k, layout, packed);
}

void unpack_weight(const PackedWeight& packed, int8_t* w, Stream stream) {
  if (packed.layout.n == 0 || packed.layout.k == 0) return;
  launch(unpack_rows, blocks_for(packed.layout.n, kRowsPerBlock), kRowsPerBlock * kWarp, 0, stream,
         packed.w, packed.layout, w);
}

void copy_words(const void* from, int64_t count, void* to, Stream stream) {
  if (count == 0) return;
  launch(copy, blocks_for(count, kCopyThreads), kCopyThreads, 0, stream,
         static_cast<const uint32_t*>(from), count, static_cast<uint32_t*>(to));
}

}  // namespace qfx::cuda
