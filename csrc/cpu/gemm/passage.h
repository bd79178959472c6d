// A block of rows meets one panel or two, tile by tile: what is multiplied, and what is fetched
// meanwhile.
#pragma once

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// All tiles of a panel, of which the sink gets the sums. `sums` has room for the block.
void run_panel(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
               int32_t* sums, const TileSink& sink);

// The sums [rows][32] of at most the rows of one tile; the weights are streamed.
void multiply_few(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
                  const Passage& how, int32_t* sums);

// The sums [2][rows][32] of few rows and two panels at once.
void multiply_pair(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
                   int64_t q, int32_t* sums);

}  // namespace qfx::cpu
