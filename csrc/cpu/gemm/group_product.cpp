#include "cpu/gemm/group_product.h"

#include <algorithm>

#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of arranging, in parallel.h's unit
constexpr int64_t kGroupsAtOnce = 8;      // whose raw tiles wait in L1

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
        w_(weight.w),
        block_(block),
        p_(p),
        scale_(values_of_panel(w_, weight.scale, p, memory.scale)),
        zero_(values_of_panel(w_, weight.zero, p, memory.zero)),
        how_(passage_of(rows.rows, w_, block.rows())),
        raw_(memory.raw.get<int32_t>(std::max<int64_t>(block.rows(), kGroupsAtOnce * kMaxTileRows) *
                                     kPanel)),
        sums_(memory.sums.get<float>(block.rows() * kPanel)) {}

  // The sums of floats [rows of the block][32].
  const float* run() const {
    const Format& format = *rows_.rows.format;
    std::fill_n(sums_, block_.rows() * kPanel, 0.f);
    for (int64_t k = 0, next; k < how_.depth; k = next) {
      next = end_of_block(k);
      for (int64_t m = block_.begin; m < block_.end; m += how_.height) {
        const bool fetch = m - block_.begin == how_.fetching;
        const TileFn* tiles = fetch ? how_.fetching_tiles : format.tiles;
        const int count = static_cast<int>(std::min(how_.height, block_.end - m));
        run_tile(tiles[count - 1], m, count, k, next);
      }
    }
    return sums_;
  }

 private:
  // Whole groups, or a part of one.
  int64_t end_of_block(int64_t k) const {
    if (w_.group <= how_.block) return std::min(k + how_.block / w_.group * w_.group, how_.depth);
    return std::min({k + how_.block, (k / w_.group + 1) * w_.group, how_.depth});
  }

  // Adds the products of k in [begin, end) to the sums of rows m.. once their group is complete.
  void run_tile(TileFn tile, int64_t m, int count, int64_t begin, int64_t end) const {
    const Format& format = *rows_.rows.format;
    const uint8_t* a = rows_.rows.a + m * rows_.rows.stride;
    const int8_t* b = w_.panel(p_);
    const int64_t ahead = how_.streams ? rows_.rows.tuning.ahead : (end - begin) * kPanel;
    int32_t* raw = raw_ + (w_.group > how_.block ? (m - block_.begin) * kPanel : 0);
    int64_t g = begin / w_.group;
    bool started = begin > g * w_.group;
    for (int64_t k = begin; k < end;) {
      int64_t groups = 0;
      for (; groups < kGroupsAtOnce && k < end; ++groups, started = false) {
        const int64_t next = std::min(end, (g + groups + 1) * w_.group);
        tile(a + k * format.bytes_per_code, rows_.rows.stride, b + k * kPanel, (next - k) / kGroup,
             b + k * kPanel + ahead, raw + groups * count * kPanel, started);
        k = next;
      }
      const bool complete = k == how_.depth || k == (g + groups) * w_.group;
      if (complete) add(raw, m, count, g, groups);
      g += groups;
    }
  }

  void add(const int32_t* raw, int64_t m, int count, int64_t g, int64_t groups) const {
    const int64_t step = rows_.rows.count;
    const int32_t* zero = zero_.data == nullptr ? nullptr : zero_.data + g * zero_.step;
    const GroupArgs args = {raw,
                            groups,
                            count,
                            rows_.add + g * step + m,
                            rows_.sum + g * step + m,
                            step,
                            rows_.rows.mul + m,
                            w_.group_sums + (p_ * w_.groups() + g) * kPanel,
                            scale_.data + g * scale_.step,
                            scale_.step,
                            zero,
                            zero_.step,
                            sums_ + (m - block_.begin) * kPanel};
    kernels_.sums->add_groups(&args);
  }

  const Kernels& kernels_;
  const GroupedRows& rows_;
  const PackedWeight& w_;
  const RowBlock& block_;
  const int64_t p_;
  const PanelValues<float> scale_;
  const PanelValues<int32_t> zero_;
  const Passage how_;
  int32_t* const raw_;
  float* const sums_;
};

class GroupedLinear final : public PanelWork {
 public:
  GroupedLinear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                const FloatOutput& to, const float* row_scale, int64_t scale_stride, int64_t first)
      : kernels_(kernels),
        rows_(rows),
        weight_(weight),
        to_(to),
        row_scale_(row_scale),
        scale_stride_(scale_stride),
        first_(first) {}

  void run(const RowBlock& block, int64_t p) const override {
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
    const FloatEpilogueArgs args = {sums,
                                    static_cast<int>(block.rows()),
                                    columns,
                                    row_scale_ + m * scale_stride_,
                                    scale_stride_,
                                    &panel,
                                    to_.activation,
                                    to_.dtype,
                                    out,
                                    n};
    kernels_.sums->finish_floats(&args);
  }

 private:
  const Kernels& kernels_;
  const GroupedRows& rows_;
  const GroupedWeight& weight_;
  const FloatOutput& to_;
  const float* row_scale_;
  int64_t scale_stride_, first_;
};

int32_t sum_of(const int8_t* q, int64_t k) {
  int32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += q[i];
  return sum;
}

void arrange_groups(const PackedWeight& w, const int8_t* q, int32_t zero_point, int64_t m,
                    const GroupedRows& to) {
  const Format& format = *to.rows.format;
  uint8_t* a = to.rows.a + m * to.rows.stride;
  for (int64_t g = 0, k = 0; k < w.k; ++g, k += w.group) {
    const int64_t length = std::min(w.group, w.k - k);
    const int64_t padded = round_up(length, format.k_multiple), at = g * to.rows.count + m;
    to.add[at] = format.arrange(q + k, length, padded, a + k * format.bytes_per_code);
    to.sum[at] =
        static_cast<int32_t>(static_cast<uint32_t>(sum_of(q + k, length)) -
                             static_cast<uint32_t>(zero_point) * static_cast<uint32_t>(length));
  }
  to.rows.mul[m] = static_cast<int32_t>(static_cast<uint32_t>(zero_point) +
                                        static_cast<uint32_t>(format.mul_offset));
}

}  // namespace

GroupedRows::GroupedRows(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
                         const int32_t* zero_points, int64_t zero_stride, int64_t count)
    : RowSource(make_rows(format_of_codes(kernels, w, q, count), count, w, rows_memory())),
      w(w),
      q(q),
      zero_points(zero_points),
      zero_stride(zero_stride) {
  thread_local Scratch scratch;
  add = scratch.get<int32_t>(2 * w.groups() * count);
  sum = add + w.groups() * count;
}

void GroupedRows::fill(int64_t begin, int64_t end) const {
  for (int64_t m = begin; m < end; ++m) {
    arrange_groups(w, q + m * w.k, zero_points[m * zero_stride], m, *this);
  }
}

int64_t GroupedRows::work() const { return rows.count * w.k * kStepsPerElement; }

void grouped_linear(const Kernels& kernels, const GroupedRows& rows, const GroupedWeight& weight,
                    const FloatOutput& to, const float* row_scale, int64_t scale_stride,
                    int64_t first) {
  const GroupedLinear work(kernels, rows, weight, to, row_scale, scale_stride, first);
  for_each_panel(rows, weight.w, work);
}

}  // namespace qfx::cpu
