// Whole products of rows and a weight, handed to a sink.
#pragma once

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// All of them must outlive it.
class WholeProduct final : public PanelWork {
 public:
  WholeProduct(const Rows& rows, const PackedWeight& w, const TileSink& sink);

  void run(const RowBlock& block, int64_t p) const override;
  void run_all(const RowBlock& block, int64_t p, int64_t end) const override;
  void run_pair(const RowBlock& block, int64_t p, int64_t q) const override;
  void finish() const override;

 private:
  bool in_strips(const RowBlock& block) const;
  void store(const RowBlock& block, int64_t p, const int32_t* sums) const;

  const Rows& rows_;
  const PackedWeight& w_;
  const TileSink& sink_;
  const Strips* strips_;
};

}  // namespace qfx::cpu
