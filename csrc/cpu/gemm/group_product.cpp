#include "cpu/gemm/group_product.h"

#include <algorithm>

#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kGroupsAtOnce = 8;  // whose raw tiles wait in L1

// Values of a panel: of group g and column n at [g * step + n].
template <typename T>
struct PanelValues {
  const T* data;
  int64_t step;
};

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

// The memory of a thread while it works on a panel.
struct PanelMemory {
  Scratch raw, sums, scale, zero;
};

// One panel for a block of rows.
class GroupedPanel {
 public:
  GroupedPanel(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
               const RowBlock& block, int64_t p, PanelMemory& memory)
      : kernels_(kernels),
        rows_(rows),
        weight_(weight),
        w_(weight.w),
        block_(block),
        p_(p),
        scale_(values_of_panel(w_, weight.scale, p, memory.scale)),
        zero_(values_of_panel(w_, weight.zero, p, memory.zero)),
        how_(passage_of(rows.rows, w_, block.rows())),
        raw_(raw_for(memory)),
        sums_(memory.sums.get<float>(block.rows() * kPanel)) {}

  // The sums of floats [rows of the block][32].
  const float* run() const {
    if (how_.streams) {
      fetch_values(w_, weight_.scale, p_ + 1);
      fetch_values(w_, weight_.zero, p_ + 1);
    }
    std::fill_n(sums_, block_.rows() * kPanel, 0.f);
    for (int64_t k = 0, next; k < how_.depth; k = next) {
      next = end_of_block(k);
      for (int64_t m = block_.begin; m < block_.end; m += how_.height) {
        const int count = static_cast<int>(std::min(how_.height, block_.end - m));
        const bool fetch = m - block_.begin == how_.fetching;
        if (rows_.tiles != nullptr) {
          add_in_tile(fetch, m, count, k, next);
        } else {
          add_raw(fetch ? how_.fetching_tiles[count - 1] : rows_.rows.format->tiles[count - 1], m,
                  count, k, next);
        }
      }
    }
    return sums_;
  }

 private:
  int32_t* raw_for(PanelMemory& memory) const {
    if (rows_.tiles != nullptr) return nullptr;
    const int64_t rows = std::max<int64_t>(block_.rows(), kGroupsAtOnce * kMaxTileRows);
    return memory.raw.get<int32_t>(rows * kPanel);
  }

  // Whole groups, or for raw tiles a part of one.
  int64_t end_of_block(int64_t k) const {
    const bool parts = rows_.tiles == nullptr && w_.group > how_.block;
    if (parts) return std::min({k + how_.block, (k / w_.group + 1) * w_.group, how_.depth});
    const int64_t groups = std::max<int64_t>(how_.block / w_.group, 1);
    return std::min(k + groups * w_.group, how_.depth);
  }

  const int8_t* ahead_of(int64_t begin, int64_t end) const {
    const int64_t distance = how_.streams ? rows_.rows.tuning.ahead : (end - begin) * kPanel;
    return w_.panel(p_) + begin * kPanel + distance;
  }

  GroupTerms terms_of(int64_t m, int64_t g) const {
    const int64_t at = g * rows_.rows.count + m;
    return {rows_.add + at,
            rows_.mul + at,
            rows_.sum + at,
            rows_.pair == nullptr ? nullptr : rows_.pair + at,
            rows_.scale + at,
            rows_.rows.count,
            w_.group_sums + (p_ * w_.groups() + g) * kPanel,
            scale_.data + g * scale_.step,
            scale_.step,
            zero_.data == nullptr ? nullptr : zero_.data + g * zero_.step,
            zero_.step,
            sums_ + (m - block_.begin) * kPanel};
  }

  GroupTileFn tile_of(bool fetch, int count) const {
    const GroupTiles& tiles = *rows_.tiles;
    const int zeros = rows_.pair != nullptr;
    if (!fetch) return tiles.tiles[zeros][count - 1];
    const bool by_hint = how_.streams && block_.rows() <= rows_.rows.format->few.rows;
    if (!by_hint) return tiles.prefetching[zeros][count - 1];
    return tiles.few[zeros][hint_for(rows_.rows.tuning, block_.rows())][count - 1];
  }

  // Adds the products of k in [begin, end), whole groups, to the sums of rows m...
  void add_in_tile(bool fetch, int64_t m, int count, int64_t begin, int64_t end) const {
    const Format& format = *rows_.rows.format;
    const GroupTileFn tile = tile_of(fetch, count);
    const int64_t g = begin / w_.group, whole = (end - begin) / w_.group;
    GroupTile here = {count,
                      rows_.rows.a + m * rows_.rows.stride + begin * format.bytes_per_code,
                      rows_.rows.stride,
                      w_.panel(p_) + begin * kPanel,
                      whole,
                      w_.group,
                      ahead_of(begin, end),
                      format.mul_offset,
                      terms_of(m, g)};
    if (whole > 0) tile(here);
    const int64_t taken = whole * w_.group, rest = end - begin - taken;
    if (rest == 0) return;
    here.a += taken * format.bytes_per_code;
    here.b += taken * kPanel;
    here.ahead += taken * kPanel;
    here.groups = 1;
    here.depth = rest;
    here.terms = terms_of(m, g + whole);
    tile(here);
  }

  // The same of groups or a part of one, once it is complete.
  void add_raw(TileFn tile, int64_t m, int count, int64_t begin, int64_t end) const {
    const Format& format = *rows_.rows.format;
    const uint8_t* a = rows_.rows.a + m * rows_.rows.stride;
    const int8_t *b = w_.panel(p_), *ahead = ahead_of(begin, end) - begin * kPanel;
    int32_t* raw = raw_ + (w_.group > how_.block ? (m - block_.begin) * kPanel : 0);
    int64_t g = begin / w_.group;
    bool started = begin > g * w_.group;
    for (int64_t k = begin; k < end;) {
      int64_t groups = 0;
      for (; groups < kGroupsAtOnce && k < end; ++groups, started = false) {
        const int64_t next = std::min(end, (g + groups + 1) * w_.group);
        tile(a + k * format.bytes_per_code, rows_.rows.stride, b + k * kPanel, (next - k) / kGroup,
             ahead + k * kPanel, raw + groups * count * kPanel, started);
        k = next;
      }
      const bool complete = k == how_.depth || k == (g + groups) * w_.group;
      const GroupTerms terms = terms_of(m, g);
      if (complete) kernels_.sums->add_groups(raw, groups, count, &terms);
      g += groups;
    }
  }

  const Kernels& kernels_;
  const GroupedRows& rows_;
  const GroupedWeight& weight_;
  const PackedWeight& w_;
  const RowBlock& block_;
  const int64_t p_;
  const PanelValues<float> scale_;
  const PanelValues<int32_t> zero_;
  const Passage how_;
  int32_t* const raw_;  // where the format has no tiles for groups
  float* const sums_;
};

class GroupedLinear final : public PanelWork {
 public:
  GroupedLinear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                const FloatOutput& to, int64_t first)
      : kernels_(kernels), rows_(rows), weight_(weight), to_(to), first_(first) {}

  void run(const RowBlock& block, int64_t p) const override {
    static constexpr float kScaled = 1;  // by their groups
    thread_local PanelMemory memory;
    const float* sums = GroupedPanel(kernels_, rows_, weight_, block, p, memory).run();
    const int64_t n = weight_.w.n;
    const int columns = columns_of(weight_.w, p);
    FloatPanel panel = {};
    panel.has_bias = to_.bias != nullptr;
    if (panel.has_bias) std::copy_n(to_.bias + p * kPanel, columns, panel.bias);
    std::fill_n(panel.scale, kPanel, 1.f);
    const int64_t m = first_ + block.begin;
    char* out = to_.data + (m * n + p * kPanel) * to_.element();
    const FloatEpilogueArgs args = {
        sums,
        static_cast<int>(block.rows()),
        columns,
        &kScaled,
        0,
        &panel,
        to_.activation,
        to_.dtype,
        out,
        n,
        columns == kPanel && past_caches(to_, weight_.w, rows_.rows.tuning)};
    kernels_.sums->finish_floats(&args);
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
  for_each_panel(rows, weight.w, GroupedLinear(kernels, rows, weight, to, first));
}

}  // namespace qfx::cpu
