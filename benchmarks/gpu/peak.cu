// What the tensor cores of a Hopper GPU can do: wgmma on tiles that stay in shared memory, nothing
// loaded and nothing stored meanwhile. benchmarks/gpu/peak.py compiles and calls it.
#include <cstring>

#include "cuda/sm90/gemm.cuh"

namespace qfx::cuda::sm90 {
namespace {

constexpr int kGroups = 2, kLeft = 64, kRight = 256;  // warpgroups of a block, and their tiles
constexpr int kShared = (kGroups * kLeft + kRight) * kTileBytes;

// Each warpgroup: sums += left right^T over `steps` times 128 bytes of K, always the same ones.
template <Operands kOperands>
__global__ void __launch_bounds__(kGroups* kWarpgroup, 1)
    multiply_again(const uint4* tiles, int steps, int32_t* sums) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  for (int i = threadIdx.x; i < kShared / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(shared)[i] = tiles[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what threads wrote
  __syncthreads();
  const int group = threadIdx.x / kWarpgroup;
  const uint64_t right = tile_descriptor(shared);
  const uint64_t left = tile_descriptor(shared + (kRight + group * kLeft) * kTileBytes);
  int32_t d[kRight / 2] = {};
  for (int step = 0; step < steps; ++step) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsOfStage; ++i) {
      Wgmma<kOperands, kRight>::run(d, left + i * 2, right + i * 2, 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  wgmma_results(d);
  int32_t total = 0;
  for (int i = 0; i < kRight / 2; ++i) total += d[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

}  // namespace
}  // namespace qfx::cuda::sm90

// Multiply-adds of one launch, of codes ("s8") or of bits ("b1").
extern "C" double peak_multiplies(const char* operands, int blocks, int steps) {
  using namespace qfx::cuda::sm90;
  const double per_byte = std::strcmp(operands, "b1") == 0 ? 8 : 1;
  return per_byte * blocks * kGroups * kLeft * kRight * kTileBytes * steps;
}

// `tiles`: 48 KB; `sums`: int32 [blocks][256]. Returns a CUDA error, 0 if there is none.
extern "C" int peak_launch(const char* operands, int blocks, int steps, const void* tiles,
                           void* sums, void* stream) {
  using namespace qfx::cuda::sm90;
  const auto kernel = std::strcmp(operands, "b1") == 0 ? multiply_again<Operands::kBits>
                                                       : multiply_again<Operands::kCodes>;
  kernel<<<blocks, kGroups * kWarpgroup, kShared, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(tiles), steps, static_cast<int32_t*>(sums));
  return static_cast<int>(cudaGetLastError());
}
