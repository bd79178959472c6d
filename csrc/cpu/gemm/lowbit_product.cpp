#include "cpu/gemm/lowbit_product.h"

#include <algorithm>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/gemm/group_panel.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kUnpackMultiple = 2 * kGroup;  // of k

int width_of(const LowbitWeight& w) { return static_cast<int>(w.kind.bits - kFewestBits); }

// Codes less zero points in bytes, a few groups at a time.
class UnpackedPanel final : public PanelReader {
 public:
  UnpackedPanel(const Kernels& kernels, const LowbitWeight& w, int64_t p, PanelMemory& memory)
      : kernels_(kernels), w_(w), p_(p), memory_(memory) {}

  PanelGroups read(int64_t begin, int64_t end) override {
    const UnpackGroupFn unpack = kernels_.lowbit->unpack[width_of(w_)];
    const int64_t group = w_.kind.group, first = begin / group;
    const int64_t groups = (end - begin + group - 1) / group;
    int8_t* codes = memory_.codes.get<int8_t>(groups * group * kPanel);
    int32_t* colsum = memory_.colsum.get<int32_t>(groups * kPanel);
    float* scale = memory_.scale.get<float>(groups * kPanel);
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t g = first + i, depth = std::min(group, end - begin - i * group);
      const uint8_t* block = w_.block(p_, g);
      fetch_next(block + w_.kind.block());
      unpack(block, round_up(depth, kUnpackMultiple), group, w_.zero(p_, g),
             codes + i * group * kPanel, colsum + i * kPanel);
      kernels_.row->widen(block, w_.kind.scales, kPanel, scale + i * kPanel);
    }
    return {codes, colsum, {scale, kPanel}, {nullptr, 0}};
  }

  bool in_order() const override { return false; }

 private:
  void fetch_next(const uint8_t* block) const {
    for (int64_t i = 0; i < w_.kind.block(); i += 64) __builtin_prefetch(block + i);
  }

  const Kernels& kernels_;
  const LowbitWeight& w_;
  const int64_t p_;
  PanelMemory& memory_;
};

// The minimums of groups, as the products before them: fma(sum of x, factor * minimum, sums).
struct Minimums {
  const Kernels& kernels;
  const LowbitWeight& w;
  const int64_t p;

  void add(int64_t g, float sum, float factor, float* sums) const {
    float minimum[kPanel], same[kPanel];
    const uint8_t* from = w.shifts(p) + g * kPanel * static_cast<int64_t>(sizeof(uint16_t));
    kernels.row->widen(from, w.kind.scales, kPanel, minimum);
    std::fill_n(same, kPanel, sum);
    kernels.lowbit->add_scaled(same, factor, minimum, sums);
  }
};

// What is chosen for one row of int8, but into the second cache where that is the first: to fetch a
// line costs these tiles more, as they fetch half as many in the same time. The second cache has
// room for more of them: 8192 bytes ahead were the fastest on a Zen 4 and on a Xeon with AMX.
Tuning streaming(Tuning tuning) {
  constexpr int64_t kIntoSecond = 8192;
  if (tuning.hint == kNta) return tuning;
  tuning.hint = kT1;
  tuning.ahead = std::max(tuning.ahead, kIntoSecond);
  return tuning;
}

class LowbitProduct final : public PanelWork {
 public:
  LowbitProduct(const Kernels& kernels, const GroupedRows& rows, const LowbitWeight& w,
                const FloatOutput& to, int64_t first, const Streaming* how)
      : kernels_(kernels),
        rows_(rows),
        w_(w),
        to_(to),
        first_(first),
        tuning_(
            with_streaming(streaming(tuning_of(format_for(kernels, Operands::kWide, 1))), how)) {}

  void run(const RowBlock& block, int64_t p) const override { run_all(block, p, p + 1); }

  void run_all(const RowBlock& block, int64_t p, int64_t end) const override {
    thread_local PanelMemory memory;
    if (rows_.rows.format != kernels_.lowbit->rows) {
      for (; p < end; ++p) store(block, p, unpacked(block, p, memory));
      return;
    }
    if (const int64_t whole = std::min(end, w_.shape.n / kPanel); is_output(block) && p < whole) {
      const int64_t at = (first_ + block.begin) * w_.shape.n + p * kPanel;
      multiply(block, p, whole - p, w_.zero(p, 0), reinterpret_cast<float*>(to_.data) + at);
      p = whole;
    }
    // Each panel has the same zeros where it has minimums.
    const int64_t most = w_.kind.shift == Shift::kMinimums ? 1 : panels_at_once(block.rows());
    const int64_t size = block.rows() * kPanel;
    for (int64_t next; p < end; p = next) {
      next = std::min(p + most, end);
      float* sums = memory.sums.get<float>((next - p) * size);
      multiply(block, p, next - p, zeros(p, memory), sums);
      for (int64_t q = p; q < next; ++q, sums += size) store(block, q, sums);
    }
  }

 private:
  // Whether nothing is to be done to the sums of its one row.
  bool is_output(const RowBlock& block) const {
    return block.rows() == 1 && w_.kind.shift != Shift::kMinimums && to_.bias == nullptr &&
           to_.activation == Activation::kNone && to_.dtype == Dtype::kFloat32;
  }

  void store(const RowBlock& block, int64_t p, float* sums) const {
    if (w_.kind.shift == Shift::kMinimums) add_minimums(block, p, sums);
    const bool past = past_caches(to_, w_.shape, rows_.rows.tuning);
    finish_sums(kernels_, {w_.shape, first_ + block.begin, block.rows(), p, past}, to_, sums);
  }

  void add_minimums(const RowBlock& block, int64_t p, float* sums) const {
    const Minimums minimums = {kernels_, w_, p};
    for (int64_t g = 0; g < w_.shape.groups(); ++g) {
      for (int64_t m = block.begin; m < block.end; ++m) {
        const int64_t at = g * rows_.rows.count + m;
        minimums.add(g, static_cast<float>(rows_.sum[at]), rows_.scale[at],
                     sums + (m - block.begin) * kPanel);
      }
    }
  }

  float* unpacked(const RowBlock& block, int64_t p, PanelMemory& memory) const {
    UnpackedPanel reader(kernels_, w_, p, memory);
    return GroupedPanel(kernels_, rows_, block, reader, memory).run();
  }

  // [G][32], or null.
  const uint8_t* zeros(int64_t p, PanelMemory& memory) const {
    if (w_.kind.shift != Shift::kMinimums) return w_.zero(p, 0);
    const int64_t count = w_.shape.groups() * kPanel;
    uint8_t* none = memory.zero.get<uint8_t>(count);
    std::fill_n(none, count, uint8_t{0});
    return none;
  }

  // Sums [panels][rows][32] of panels p, p + 1, ...
  void multiply(const RowBlock& block, int64_t p, int64_t panels, const uint8_t* zero,
                float* sums) const {
    const int64_t groups = w_.shape.groups(), m = block.begin;
    const LowbitTile tile = {static_cast<int>(block.rows()),
                             reinterpret_cast<const int8_t*>(rows_.rows.a) + m * rows_.rows.stride,
                             rows_.rows.stride,
                             w_.block(p, 0),
                             w_.kind.block(),
                             groups,
                             w_.kind.group,
                             groups == 0 ? 0 : w_.depth(groups - 1),
                             zero,
                             panels,
                             w_.kind.panel(groups),
                             w_.kind.scales,
                             ahead(),
                             rows_.sum + m,
                             rows_.scale + m,
                             rows_.rows.count,
                             sums};
    const auto* tiles = kernels_.lowbit->few[width_of(w_)][hint_for(tuning_, block.rows())];
    tiles[block.rows() - 1](tile);
  }

  // Whole groups: then their scales, nibbles and fifth bits, which are read side by side, are all
  // fetched as early as that.
  int64_t ahead() const { return round_up(tuning_.ahead, w_.kind.block()); }

  const Kernels& kernels_;
  const GroupedRows& rows_;
  const LowbitWeight& w_;
  const FloatOutput& to_;
  const int64_t first_;
  const Tuning tuning_;  // that this machine chose for one row of int8: how weights are fetched
};

// One panel times rows of floats, which are added up group by group. (W3)
class FloatPanelProduct {
 public:
  FloatPanelProduct(const Kernels& kernels, const FloatRowsInMemory& x, const LowbitWeight& w,
                    int64_t p, PanelMemory& memory)
      : kernels_(kernels),
        x_(x),
        w_(w),
        p_(p),
        memory_(memory),
        sums_(memory.sums.get<float>(x.rows * kPanel)) {}

  // [rows][32]
  const float* run() const {
    constexpr int64_t kAtOnce = 512;  // of K, whose codes stay in the first cache
    std::fill_n(sums_, x_.rows * kPanel, 0.f);
    UnpackedPanel reader(kernels_, w_, p_, memory_);
    for (int64_t k = 0; k < w_.shape.k; k += kAtOnce) {
      const int64_t end = std::min(k + kAtOnce, round_up(w_.shape.k, kUnpackMultiple));
      const PanelGroups groups = reader.read(k, end);
      for (int64_t m = 0; m < x_.rows; ++m) multiply(groups, k, end, m);
    }
    if (w_.kind.shift == Shift::kMinimums) add_minimums();
    return sums_;
  }

 private:
  void multiply(const PanelGroups& groups, int64_t begin, int64_t end, int64_t m) const {
    for (int64_t k = begin, i = 0; k < end; k += w_.kind.group, ++i) {
      const int8_t* b = groups.b + i * w_.kind.group * kPanel;
      kernels_.lowbit->add_scaled(dot(m, k, b).sums, 1.f, groups.scale.from(i).data,
                                  sums_ + m * kPanel);
    }
  }

  void add_minimums() const {
    alignas(64) int8_t ones[kLongestGroup * kPanel];
    std::fill_n(ones, sizeof(ones), int8_t{1});
    const Minimums minimums = {kernels_, w_, p_};
    for (int64_t g = 0; g < w_.shape.groups(); ++g) {
      for (int64_t m = 0; m < x_.rows; ++m) {
        const float sum = dot(m, g * w_.kind.group, ones).sums[0];
        minimums.add(g, sum, 1.f, sums_ + m * kPanel);
      }
    }
  }

  struct Dot {
    float sums[kPanel];
  };

  // Of row m and the group that begins at k. (W1)
  Dot dot(int64_t m, int64_t k, const int8_t* b) const {
    Dot made;
    const int64_t quads = (w_.length(k / w_.kind.group) + kGroup - 1) / kGroup;
    kernels_.sums->weight_only[kT0](x_.data + m * x_.stride + k, b, quads, 0, made.sums);
    return made;
  }

  static constexpr int64_t kLongestGroup = 128;
  const Kernels& kernels_;
  const FloatRowsInMemory& x_;
  const LowbitWeight& w_;
  const int64_t p_;
  PanelMemory& memory_;
  float* const sums_;
};

}  // namespace

const Format& lowbit_format_for(const Kernels& kernels, const LowbitWeight& w, bool zero_points,
                                int64_t rows) {
  const Format* few = kernels.lowbit->rows;
  if (few != nullptr && !zero_points && rows <= few->few.rows) return *few;
  return format_for(kernels, operands_of(w.shape, false), rows);
}

bool needs_sums(const Kernels& kernels, const LowbitWeight& w, const Format& format) {
  return &format == kernels.lowbit->rows || w.kind.shift == Shift::kMinimums;
}

void lowbit_linears(const Kernels& kernels, const GroupedRows& rows,
                    std::span<const LowbitLinear> all, int64_t first, const Streaming* how) {
  std::vector<LowbitProduct> works;
  std::vector<Columns> columns;
  works.reserve(all.size());
  for (const auto& [w, to] : all) {
    columns.push_back({w.shape, works.emplace_back(kernels, rows, w, to, first, how)});
  }
  for_each_panel(rows, columns);
}

void lowbit_weight_linear(const Kernels& kernels, const FloatRowsInMemory& x, const LowbitWeight& w,
                          const FloatOutput& to) {
  constexpr int64_t kStepsPerProduct = 4;  // in parallel.h's unit
  const int64_t products = x.rows * w.shape.n * w.shape.k;
  parallel(w.shape.panels(), kStepsPerProduct * products, [&](int64_t begin, int64_t end) {
    thread_local PanelMemory memory;
    for (int64_t p = begin; p < end; ++p) {
      const float* sums = FloatPanelProduct(kernels, x, w, p, memory).run();
      finish_sums(kernels, {w.shape, 0, x.rows, p, false}, to, sums);
    }
  });
}

}  // namespace qfx::cpu
