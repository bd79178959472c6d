// Hopper's own instructions (sm_90a), one wrapper each: mbarrier, TMA tile loads, clusters, wgmma
// on codes and on bits, registers handed from one warpgroup to others.
// tests/cuda/emulated/cuda/sm90/ptx.cuh is the twin that runs on a CPU, by the text of the PTX
// ISA 8.5; both must have the same names.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/ptx.cuh"
#include "cuda/sm90/config.h"

namespace qfx::cuda::sm90 {

// Counts arrivals and bytes of a phase; in shared memory.
struct alignas(8) Barrier {
  uint64_t state;
};

__device__ __forceinline__ void init_barrier(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}

// Makes initialized barriers visible to the copy engine; a __syncthreads() makes them so to
// threads.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives at the barrier that lies where b does in block `block` of the cluster. Without .cluster,
// whose fence of global memory would cost a step of K: it would publish what this thread has
// written, and a thread that releases a stage has written nothing.
__device__ __forceinline__ void arrive_at(Barrier* b, int block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(b)),
      "r"(block)
      : "memory");
}

// Arrives, and adds `bytes` to what the copy engine has yet to deliver before the phase completes.
__device__ __forceinline__ void arrive_expecting(Barrier* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
}

// Until the phase of this parity is complete. A new barrier is in phase 0, the one before it, of
// parity 1, counts as complete.
__device__ __forceinline__ void wait_phase(Barrier* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// Fetches the map itself, so that the first load through it need not.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of the map at (byte k, row, matrix) into shared memory; its bytes complete on the
// barrier.
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, Barrier* b, int k,
                                          int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(b)), "r"(k), "r"(row), "r"(matrix)
      : "memory");
}

// The same to the same place in each block of the cluster whose bit is set in `blocks`; its bytes
// complete on the barrier at the same place in each.
__device__ __forceinline__ void load_tile_to(unsigned blocks, void* to, const CUtensorMap* map,
                                             Barrier* b, int k, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(b)), "r"(k), "r"(row), "r"(matrix),
      "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

__device__ __forceinline__ int block_in_cluster() {
  int block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}

// All threads of the cluster meet; what they have written before, and barriers that
// show_barriers() has shown, are visible to all afterwards.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Of the warpgroup that loads: what it does not need goes to those that multiply.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Registers written by ordinary code are in order before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all but the latest kPending committed groups have read their tiles and written d.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No read of d is moved in front of the wait before this.
template <int kSize>
__device__ __forceinline__ void wgmma_results(int32_t (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// 32 bytes of K in one wgmma: d[64][kColumns] (+)= left[64] right[kColumns]^T, int8 products, or
// popcounts of the AND of bits. Thread t holds, of row 16 (t / 32) + t % 32 / 4 + 8 h and column
// 8 j + 2 (t % 4) + e, the element d[4 j + 2 h + e].
template <Operands kOperands, int kColumns>
struct Wgmma;

#define QFX_NAMES(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define QFX_NAMES_4 "%0,%1,%2,%3"
#define QFX_NAMES_8 QFX_NAMES_4 ",%4,%5,%6,%7"
#define QFX_NAMES_16 QFX_NAMES() ",%10,%11,%12,%13,%14,%15"
#define QFX_NAMES_32 QFX_NAMES() "," QFX_NAMES(1) "," QFX_NAMES(2) ",%30,%31"
#define QFX_NAMES_60 \
  QFX_NAMES() "," QFX_NAMES(1) "," QFX_NAMES(2) "," QFX_NAMES(3) "," QFX_NAMES(4) "," QFX_NAMES(5)
#define QFX_NAMES_64 QFX_NAMES_60 ",%60,%61,%62,%63"
#define QFX_NAMES_128                                                                             \
  QFX_NAMES_60 "," QFX_NAMES(6) "," QFX_NAMES(7) "," QFX_NAMES(8) "," QFX_NAMES(9) "," QFX_NAMES( \
      10) "," QFX_NAMES(11) ",%120,%121,%122,%123,%124,%125,%126,%127"
#define QFX_REGISTERS_4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define QFX_REGISTERS_8(i) QFX_REGISTERS_4(i), QFX_REGISTERS_4(i + 4)
#define QFX_REGISTERS_16(i) QFX_REGISTERS_8(i), QFX_REGISTERS_8(i + 8)
#define QFX_REGISTERS_32(i) QFX_REGISTERS_16(i), QFX_REGISTERS_16(i + 16)
#define QFX_REGISTERS_64(i) QFX_REGISTERS_32(i), QFX_REGISTERS_32(i + 32)
#define QFX_REGISTERS_128(i) QFX_REGISTERS_64(i), QFX_REGISTERS_64(i + 64)
// `size` registers of each thread are operands 0 to size - 1 of the instruction; left, right and
// whether to add to d are the next three.
#define QFX_WGMMA(operands, columns, size, shape, types, left, right, add)                   \
  template <>                                                                                \
  struct Wgmma<Operands::operands, columns> {                                                \
    static __device__ __forceinline__ void run(int32_t (&d)[size], uint64_t a, uint64_t b,   \
                                               int accumulate) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add                                 \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned." shape ".s32." types " {" QFX_NAMES_##size \
                   "}, %" #left ", %" #right ", p;\n}"                                       \
                   : QFX_REGISTERS_##size(0)                                                 \
                   : "l"(a), "l"(b), "r"(accumulate));                                       \
    }                                                                                        \
  };
#define QFX_WGMMA_BOTH(columns, size, left, right, add)                              \
  QFX_WGMMA(kCodes, columns, size, "m64n" #columns "k32", "s8.s8", left, right, add) \
  QFX_WGMMA(kBits, columns, size, "m64n" #columns "k256", "b1.b1.and.popc", left, right, add)

QFX_WGMMA_BOTH(8, 4, 4, 5, 6)
QFX_WGMMA_BOTH(16, 8, 8, 9, 10)
QFX_WGMMA_BOTH(32, 16, 16, 17, 18)
QFX_WGMMA_BOTH(64, 32, 32, 33, 34)
QFX_WGMMA_BOTH(128, 64, 64, 65, 66)
QFX_WGMMA_BOTH(256, 128, 128, 129, 130)

#undef QFX_WGMMA_BOTH
#undef QFX_WGMMA
#undef QFX_REGISTERS_128
#undef QFX_REGISTERS_64
#undef QFX_REGISTERS_32
#undef QFX_REGISTERS_16
#undef QFX_REGISTERS_8
#undef QFX_REGISTERS_4
#undef QFX_NAMES_128
#undef QFX_NAMES_64
#undef QFX_NAMES_60
#undef QFX_NAMES_32
#undef QFX_NAMES_16
#undef QFX_NAMES_8
#undef QFX_NAMES_4
#undef QFX_NAMES

}  // namespace qfx::cuda::sm90
