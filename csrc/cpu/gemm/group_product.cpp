#include "cpu/gemm/group_product.h"

#include <vector>

#include "cpu/gemm/group_panel.h"

namespace qfx::cpu {
namespace {

// int8 codes, scales and zero points are read where they lie.
class Int8Panel final : public PanelReader {
 public:
  Int8Panel(const PackedWeight& w, int64_t p) : w_(w), p_(p) {}

  PanelGroups read(int64_t begin, int64_t /*end*/) override {
    const int64_t g = begin / w_.group, step = w_.scale_step();
    const PanelValues<float> scale = {w_.scales(p_), step};
    const PanelValues<int32_t> zero = {w_.zeros(p_), step};
    return {w_.panel(p_) + begin * kPanel, w_.sums(p_) + g * kPanel, scale.from(g), zero.from(g)};
  }

  bool in_order() const override { return true; }

 private:
  const PackedWeight& w_;
  const int64_t p_;
};

class GroupedProduct final : public PanelWork {
 public:
  GroupedProduct(const Kernels& kernels, const GroupedRows& rows, const GroupedLinear& linear,
                 int64_t first)
      : kernels_(kernels), rows_(rows), linear_(linear), first_(first) {}

  void run(const RowBlock& block, int64_t p) const override {
    thread_local PanelMemory memory;
    const auto& [w, to] = linear_;
    Int8Panel reader(w, p);
    GroupedPanel panel(kernels_, rows_, block, reader, memory);
    const bool past = past_caches(to, w, rows_.rows.tuning);
    finish_sums(kernels_, {w, first_ + block.begin, block.rows(), p, past}, to, panel.run());
  }

 private:
  const Kernels& kernels_;
  const GroupedRows& rows_;
  const GroupedLinear linear_;
  int64_t first_;
};

}  // namespace

std::unique_ptr<PanelWork> grouped_work(const Kernels& kernels, const GroupedRows& rows,
                                        const GroupedLinear& linear, int64_t first) {
  return std::make_unique<GroupedProduct>(kernels, rows, linear, first);
}

void grouped_linears(const Kernels& kernels, const GroupedRows& rows,
                     std::span<const GroupedLinear> all, int64_t first) {
  std::vector<GroupedProduct> works;
  std::vector<Columns> columns;
  works.reserve(all.size());
  for (const GroupedLinear& each : all) {
    columns.push_back({each.w, works.emplace_back(kernels, rows, each, first)});
  }
  for_each_panel(rows, columns);
}

}  // namespace qfx::cpu
