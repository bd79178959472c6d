// The twin of csrc/cuda/sm90/ptx.cuh for the emulator: same names, in C++, after the PTX ISA.
#pragma once

#include <cuda.h>

#include "copy_engine.h"
#include "cuda/core/ptx.cuh"
#include "cuda/sm90/config.h"
#include "wgmma.h"

namespace qfx::cuda::sm90 {

struct alignas(8) Barrier {
  uint64_t state;
};

inline void init_barrier(Barrier* b, int arrivals) { emulated::init_barrier(b, arrivals); }
inline void show_barriers() { emulated::show_barriers(); }
inline void arrive(Barrier* b) { emulated::arrive(b, 0); }
inline void arrive_at(Barrier* b, int block) {
  emulated::arrive_at(b, static_cast<unsigned>(block));
}
inline void arrive_expecting(Barrier* b, uint32_t bytes) { emulated::arrive(b, bytes); }
inline void wait_phase(Barrier* b, uint32_t parity) { emulated::wait_phase(b, parity); }
inline void prefetch_map(const CUtensorMap* map) { emulated::check_map(map); }
inline void load_tile(void* to, const CUtensorMap* map, Barrier* b, int k, int row, int matrix) {
  emulated::load_tile(to, map, b, {k, row, matrix});
}
inline void load_tile_to(unsigned blocks, void* to, const CUtensorMap* map, Barrier* b, int k,
                         int row, int matrix) {
  emulated::load_tile(to, map, b, {k, row, matrix}, blocks);
}

inline int block_in_cluster() { return static_cast<int>(emulated::block_in_cluster()); }
inline void sync_cluster() { emulated::sync_cluster(); }

template <int kCount>
inline void release_registers() {
  emulated::set_registers(kCount, false);
}
template <int kCount>
inline void take_registers() {
  emulated::set_registers(kCount, true);
}

inline void wgmma_fence() { emulated::wgmma_fence(); }
inline void wgmma_commit() { emulated::wgmma_commit(); }
template <int kPending>
inline void wgmma_wait() {
  emulated::wgmma_wait(kPending);
}
template <int kSize>
inline void wgmma_results(int32_t (&)[kSize]) {}

template <Operands kOperands, int kColumns>
struct Wgmma {
  static void run(int32_t (&d)[kColumns / 2], uint64_t left, uint64_t right, int accumulate) {
    constexpr auto kProduct =
        kOperands == Operands::kCodes ? emulated::Product::kBytes : emulated::Product::kBits;
    emulated::wgmma(kProduct, kColumns, d, left, right, accumulate != 0);
  }
};

}  // namespace qfx::cuda::sm90
