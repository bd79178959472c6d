// The instructions of PTX that the kernels use, one wrapper each, and how kernels are launched. The
// tests compile the kernels for the host with tests/cuda/emulated/cuda/core/ptx.cuh in place of
// this file: same names, same meaning. Layouts of fragments: PTX ISA, "Matrix fragments for mma".
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <utility>

#include "cuda/core/stream.h"

namespace qfx::cuda {

#if defined(__CUDA_ARCH__)
constexpr int kArchitecture = __CUDA_ARCH__ / 10;  // 75, 80, ...: what the code may use
#else
constexpr int kArchitecture = 0;  // the host's pass, which only declares
#endif
constexpr unsigned kAllLanes = 0xffffffffu;

// --- launching ---

// kernel<<<grid, block, shared_bytes, stream>>>(args...), more than 48 KB of shared memory too, and
// in clusters of kCluster blocks that follow each other in x.
template <unsigned kCluster = 1, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Stream stream, Arguments&&... arguments) {
  constexpr size_t kWithoutAsking = 48 << 10;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kWithoutAsking) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  if constexpr (kCluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  if (error == cudaSuccess) {
    error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  }
  STD_TORCH_CHECK(error == cudaSuccess,
                  "a CUDA kernel was not launched: ", cudaGetErrorString(error));
}

// The shared memory that the launch requested, 1024-byte aligned, as swizzled tiles want it.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

// One T of the block. T is a struct of the kernel that calls it: two calls with one T are one T.
template <typename T>
__device__ __forceinline__ T& static_shared() {
  __shared__ T memory;
  return memory;
}

// --- memory ---

// A load and a store of data that is used once, so that it takes no room in the caches.
template <typename T>
__device__ __forceinline__ T load_once(const T* p) {
  return __ldcs(p);
}
template <typename T>
__device__ __forceinline__ void store_once(T* p, T value) {
  __stcs(p, value);
}

// One store of 8 or 16 bytes, which the compiler would take apart where its elements are known.
__device__ __forceinline__ void store_vector(uint2* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_vector(uint4* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies the first `bytes` of 16 into shared memory and zeros after them, asynchronously. sm_80.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// All but the `kLeft` last groups of this thread have arrived.
template <int kLeft>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// --- barriers ---

// Barrier `id` of 1..15 for `count` threads, a multiple of 32: arrive and wait, or arrive alone.
__device__ __forceinline__ void barrier_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// --- matrix products of a warp: d += a b ---
// g = lane / 4, t = lane % 4; a register holds 4 consecutive k, or 32 bits of them.

// Four 8 x 16-byte matrices; lane i names row i % 8 of matrix i / 8, and gets the 4 bytes at
// column 4 t of row g of each.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[8][8] of a[8][16], b[16][8], int8. a: row g, k 4 t; b: column g, k 4 t; d: row g, columns 2 t
// and 2 t + 1. sm_75.
__device__ __forceinline__ void mma_s8_8x8x16(int (&d)[2], unsigned a, unsigned b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a), "r"(b));
}

// d[16][8] of a[16][32], b[32][8], int8. a[i]: row g + 8 (i % 2), k 4 t + 16 (i / 2); b[i]: column
// g, k 4 t + 16 i; d[i]: row g + 8 (i / 2), column 2 t + i % 2. sm_80.
__device__ __forceinline__ void mma_s8_16x8x32(int (&d)[4], const unsigned (&a)[4],
                                               const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[8][8] += popcount(a[8][128] xor b[128][8]), bits. a: row g, bits 32 t; b: column g; d as for
// mma_s8_8x8x16. sm_75.
__device__ __forceinline__ void mma_xor_8x8x128(int (&d)[2], unsigned a, unsigned b) {
  asm volatile(
      "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a), "r"(b));
}

// d[16][8] += popcount(a[16][256] and b[256][8]), bits. a[i]: row g + 8 (i % 2), bits 32 t +
// 128 (i / 2); b[i]: column g, bits 32 t + 128 i; d as above. Hopper has no xor in hardware. sm_80.
__device__ __forceinline__ void mma_b1_16x8x256(int (&d)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16][8] += a[16][16] b[16][8], of pairs of 16-bit floats, with float32 sums. a[i]: row
// g + 8 (i % 2), k 2 t + 8 (i / 2); b[i]: column g, k 2 t + 8 i; d as above. sm_80.
__device__ __forceinline__ void mma_bf16_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// --- pairs of 16-bit floats ---

// a - b of each, where that is exact; as a fused multiply-add, which sm_80 has for both types.
__device__ __forceinline__ unsigned subtract_bf16(unsigned a, unsigned b) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80u), "r"(b ^ 0x80008000u));
  return d;
}
__device__ __forceinline__ unsigned subtract_f16(unsigned a, unsigned b) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3c003c00u), "r"(b ^ 0x80008000u));
  return d;
}

}  // namespace qfx::cuda
