// Products of a format whose tiles are finished while the next ones are multiplied (Strips).
#pragma once

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

struct StripProduct {
  const Rows& rows;
  const PackedWeight& w;
  const TileSink& sink;
  const Strips& strips;
};

// Those of the format, where the sink has an epilogue and K is deep enough; or null.
const Strips* strips_for(const Rows& rows, const PackedWeight& w, const TileSink& sink);

// A block of rows and panels p, p + 1, ..., or two panels. `sums`, of a block where K is cut and of
// a pair, is used until the thread's next call, or until finish_strips, which must come before the
// thread multiplies anything else.
void run_strips(const StripProduct& product, const RowBlock& block, int64_t p, int64_t end,
                int32_t* sums);
void run_strip_pair(const StripProduct& product, const RowBlock& block, int64_t p, int64_t q,
                    int32_t* sums);

// Finishes what the last call on this thread left undone, if there is something.
void finish_strips(const Strips& strips);

}  // namespace qfx::cpu
