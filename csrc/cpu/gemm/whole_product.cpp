#include "cpu/gemm/whole_product.h"

#include <algorithm>

#include "cpu/gemm/passage.h"
#include "cpu/gemm/strips.h"

namespace qfx::cpu {
namespace {

int32_t* sums_for(int64_t rows) {
  thread_local Scratch scratch;
  return scratch.get<int32_t>(rows * kPanel);
}

}  // namespace

WholeProduct::WholeProduct(const Rows& rows, const PackedWeight& w, const TileSink& sink)
    : rows_(rows), w_(w), sink_(sink), strips_(strips_for(rows, w, sink)) {}

void WholeProduct::run(const RowBlock& block, int64_t p) const {
  if (in_strips(block)) return run_all(block, p, p + 1);
  finish();
  run_panel(rows_, w_, block, p, sums_for(block.rows() + kMaxTileRows), sink_);
}

void WholeProduct::run_all(const RowBlock& block, int64_t p, int64_t end) const {
  if (in_strips(block)) {
    int32_t* sums = sums_for(block.rows() + kMaxTileRows);
    return run_strips({rows_, w_, sink_, *strips_}, block, p, end, sums);
  }
  const Passage how = passage_of(rows_, w_, block.rows());
  const bool few = strips_ == nullptr && how.streams && block.rows() <= how.height;
  if (!few) return PanelWork::run_all(block, p, end);
  const int64_t most = panels_at_once(block.rows()), size = block.rows() * kPanel;
  for (int64_t next; p < end; p = next) {
    next = std::min(p + most, end);
    int32_t* sums = sums_for(most * block.rows());
    sink_.fetch_panels(p, next);
    for (int64_t q = p; q < next; ++q) {
      multiply_few(rows_, w_, block, q, how, sums + (q - p) * size);
    }
    for (int64_t q = p; q < next; ++q, sums += size) store(block, q, sums);
  }
}

void WholeProduct::run_pair(const RowBlock& block, int64_t p, int64_t q) const {
  const int64_t count = block.rows();
  int32_t* sums = sums_for(2 * count);
  if (strips_ != nullptr && count <= strips_->least_rows) {
    return run_strip_pair({rows_, w_, sink_, *strips_}, block, p, q, sums);
  }
  multiply_pair(rows_, w_, block, p, q, sums);
  store(block, p, sums);
  store(block, q, sums + count * kPanel);
}

void WholeProduct::finish() const {
  if (strips_ != nullptr) finish_strips(*strips_);
}

bool WholeProduct::in_strips(const RowBlock& block) const {
  return strips_ != nullptr && block.rows() > strips_->least_rows;
}

void WholeProduct::store(const RowBlock& block, int64_t p, const int32_t* sums) const {
  Panel columns;
  sink_.load_panel(p, &columns);
  sink_.tile(sums, block.begin, static_cast<int>(block.rows()), p, columns);
}

}  // namespace qfx::cpu
