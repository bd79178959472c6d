// Hopper's copy engine and the barriers it completes on, by the text of the PTX ISA 8.5 (mbarrier,
// cp.async.bulk.tensor, "Tensor swizzling modes"). A tile arrives late, into memory that holds
// poison from the load on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fibers.h"

namespace qfx::emulated {

// In the 8 bytes of an mbarrier, so that whoever overwrites them destroys it.
struct BarrierState {
  uint64_t mark : 17, shown : 1, phase : 1, expected : 11, pending : 11;
  int64_t bytes : 23;  // that are yet to come, or came before they were expected
};
static_assert(sizeof(BarrierState) == 8);

void init_barrier(void* barrier, int arrivals);
void show_barriers();  // to the copy engine: those this block has initialized
void arrive(void* barrier, int64_t expected_bytes);
void arrive_at(void* barrier, unsigned block);  // of the cluster, at the same place
void wait_phase(const void* barrier, uint32_t parity);

// A box of the map to shared memory, swizzled; zeros where it leaves the tensor. To the same place
// in each block of the cluster whose bit is set, where it completes on the barrier at that place.
void load_tile(void* to, const CUtensorMap* map, void* barrier, const int (&at)[3],
               unsigned blocks = 1u << block_in_cluster());

void check_map(const CUtensorMap* map);

// Where a 128-byte swizzle puts the byte that would lie at `address` of shared memory.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Byte `address` of the block's shared memory, of `bytes` that must be in it.
unsigned char* shared_bytes_at(uint32_t address, uint32_t bytes);

uint32_t address_of(const void* shared);

}  // namespace qfx::emulated
