// Hopper's products of a warpgroup by the text of the PTX ISA 8.5 (wgmma), one warp's 16 rows at a
// time. The tiles are read at a random time between the wgmma and the wait_group that covers it,
// and d holds poison until then. Beside what the ISA forbids, descriptors other than those of
// K-major tiles with a 128-byte swizzle are faults.
#pragma once

#include <cstdint>

namespace qfx::emulated {

enum class Product { kBytes, kBits };

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
void wgmma(Product product, int columns, int32_t* d, uint64_t left, uint64_t right,
           bool accumulate);

// setmaxnreg of a warpgroup; more registers than there are left wait.
void set_registers(int count, bool more);

}  // namespace qfx::emulated
