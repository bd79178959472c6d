#include "cpu/gemm/group_product.h"

#include <algorithm>

#include "cpu/gemm/group_panel.h"

namespace qfx::cpu {
namespace {

template <typename T>
PanelValues<T> values_of_panel(const PackedWeight& w, const GroupValues<T>& values, int64_t p,
                               Scratch& scratch) {
  if (values.data == nullptr) return {nullptr, 0};
  const T* from = values.data + p * kPanel * values.stride_n;
  const int columns = columns_of(w, p);
  if (values.stride_n == 1 && columns == kPanel) return {from, values.stride_g};
  T* copy = scratch.get<T>(w.groups() * kPanel);
  std::fill_n(copy, w.groups() * kPanel, T{});
  for (int n = 0; n < columns; ++n, from += values.stride_n) {
    for (int64_t g = 0; g < w.groups(); ++g) copy[g * kPanel + n] = from[g * values.stride_g];
  }
  return {copy, kPanel};
}

// Asks for the lines of panel p, if there is one: they lie far apart, so no hardware foresees them.
template <typename T>
void fetch_values(const PackedWeight& w, const GroupValues<T>& values, int64_t p) {
  if (values.data == nullptr || values.stride_n != 1 || p >= w.panels()) return;
  for (int64_t g = 0; g < w.groups(); ++g) {
    const T* line = values.data + p * kPanel + g * values.stride_g;
    __builtin_prefetch(line);
    __builtin_prefetch(line + kPanel / 2);
  }
}

// int8 codes are read where they lie.
class Int8Panel final : public PanelReader {
 public:
  Int8Panel(const GroupedWeight& weight, int64_t p, PanelMemory& memory)
      : w_(weight.w),
        p_(p),
        scale_(values_of_panel(w_, weight.scale, p, memory.scale)),
        zero_(values_of_panel(w_, weight.zero, p, memory.zero)) {}

  PanelGroups read(int64_t begin, int64_t /*end*/) override {
    const int64_t g = begin / w_.group;
    return {w_.panel(p_) + begin * kPanel, w_.group_sums + (p_ * w_.groups() + g) * kPanel,
            scale_.from(g), zero_.from(g)};
  }

  bool in_order() const override { return true; }

 private:
  const PackedWeight& w_;
  const int64_t p_;
  const PanelValues<float> scale_;
  const PanelValues<int32_t> zero_;
};

class GroupedLinear final : public PanelWork {
 public:
  GroupedLinear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                const FloatOutput& to, int64_t first)
      : kernels_(kernels), rows_(rows), weight_(weight), to_(to), first_(first) {}

  void run(const RowBlock& block, int64_t p) const override {
    thread_local PanelMemory memory;
    Int8Panel reader(weight_, p, memory);
    GroupedPanel panel(kernels_, rows_, block, reader, memory);
    if (panel.streams()) {
      fetch_values(weight_.w, weight_.scale, p + 1);
      fetch_values(weight_.w, weight_.zero, p + 1);
    }
    const bool past = past_caches(to_, weight_.w, rows_.rows.tuning);
    finish_sums(kernels_, {weight_.w, first_ + block.begin, block.rows(), p, past}, to_,
                panel.run());
  }

 private:
  const Kernels& kernels_;
  const GroupedRows& rows_;
  const GroupedWeight& weight_;
  const FloatOutput& to_;
  int64_t first_;
};

}  // namespace

void grouped_linear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                    const FloatOutput& to, int64_t first) {
  const GroupedLinear work(kernels, rows, weight, to, first);
  const Columns all[] = {{weight.w, work}};
  for_each_panel(rows, all);
}

}  // namespace qfx::cpu
