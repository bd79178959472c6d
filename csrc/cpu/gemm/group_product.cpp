#include "cpu/gemm/group_product.h"

#include <algorithm>
#include <vector>

#include "cpu/gemm/group_panel.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

// int8 codes and zero points are read where they lie, scales and sums too unless they have 16 bits.
class Int8Panel final : public PanelReader {
 public:
  Int8Panel(const Kernels& kernels, const PackedWeight& w, int64_t p, PanelMemory& memory)
      : kernels_(kernels), w_(w), p_(p), memory_(memory) {}

  PanelGroups read(int64_t begin, int64_t end) override {
    const int64_t g = begin / w_.group, step = w_.scale_step();
    const int64_t count = (end - begin + w_.group - 1) / w_.group * kPanel;
    const PanelValues<int32_t> zero = {w_.zeros(p_), step};
    if (w_.half.sums != nullptr) fetch_next(g * kPanel + count, end >= w_.k);
    return {w_.panel(p_) + begin * kPanel, sums(g, count), scales(g, count), zero.from(g)};
  }

  bool in_order() const override { return true; }

 private:
  // What is widened next, from value `at` of this panel on or of the panel after it: tiles fetch
  // codes alone, and would wait for it.
  void fetch_next(int64_t at, bool last) const {
    constexpr int64_t kLines = 8, kOfLine = 32;
    const int64_t p = last ? p_ + 1 : p_, from = last ? 0 : at;
    for (int64_t i = 0; i < kLines; ++i) {
      __builtin_prefetch(w_.half_scales(p) + from + i * kOfLine);
      __builtin_prefetch(w_.short_sums(p) + from + i * kOfLine);
    }
  }

  PanelValues<float> scales(int64_t g, int64_t count) const {
    const int64_t step = w_.scale_step();
    if (w_.half.scale == nullptr) return PanelValues<float>{w_.scales(p_), step}.from(g);
    float* wide = memory_.scale.get<float>(count);
    kernels_.row->widen(w_.half_scales(p_) + g * kPanel, w_.half.type, count, wide);
    return {wide, step};
  }

  const int32_t* sums(int64_t g, int64_t count) const {
    if (w_.half.sums == nullptr) return w_.sums(p_) + g * kPanel;
    int32_t* wide = memory_.colsum.get<int32_t>(count);
    std::copy_n(w_.short_sums(p_) + g * kPanel, count, wide);
    return wide;
  }

  const Kernels& kernels_;
  const PackedWeight& w_;
  const int64_t p_;
  PanelMemory& memory_;
};

class GroupedProduct final : public PanelWork {
 public:
  GroupedProduct(const Kernels& kernels, const GroupedRows& rows, const GroupedLinear& linear,
                 int64_t first)
      : kernels_(kernels), rows_(rows), linear_(linear), first_(first) {}

  void run(const RowBlock& block, int64_t p) const override {
    thread_local PanelMemory memory;
    const auto& [w, to] = linear_;
    Int8Panel reader(kernels_, w, p, memory);
    GroupedPanel panel(kernels_, rows_, block, reader, memory);
    const bool past = past_caches(to, w, rows_.rows.tuning);
    finish_sums(kernels_, {w, first_ + block.begin, block.rows(), p, past}, to, panel.run());
  }

 private:
  const Kernels& kernels_;
  const GroupedRows& rows_;
  const GroupedLinear& linear_;
  int64_t first_;
};

}  // namespace

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
