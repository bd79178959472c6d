// Products of few rows by fewer panels than keep all threads at work: K is cut too. The sums are
// exact integers, so that the parts of K add up to the bits of whole products.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// In how many parts K is cut; 1 where threads have about equal shares without that, or where rows
// are so many or K so short that adding the parts would cost more.
int64_t k_parts_of(const Extent& extent, int64_t k, int64_t threads);

// What gemm (gemm.h) does, on so many threads.
void gemm_in_parts(const RowSource& from, std::span<const Product> products, int64_t parts,
                   int64_t threads);

}  // namespace qfx::cpu
