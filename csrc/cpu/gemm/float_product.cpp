// Float activations times codes. (W1)
#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/float_tiles.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/lowbit_product.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerProduct = 4;  // in parallel.h's unit

// The memory of a thread while it works on a panel.
struct FloatPanelMemory {
  Scratch floats, chains, sums;
};

// Rows of floats times panels of codes. (W1)
class FloatProduct {
 public:
  FloatProduct(const Kernels& kernels, const Tuning& tuning, const FloatRowsInMemory& x,
               const PackedWeight& w, const FloatOutput& to)
      : kernels_(kernels),
        multiply_(*kernels.sums->weight_only),
        tuning_(tuning),
        x_(x),
        w_(w),
        to_(to) {}

  // One panel for all rows: its weights are read from memory once.
  void run(int64_t p) const {
    thread_local FloatPanelMemory memory;
    float* sums = memory.sums.get<float>(x_.rows * kPanel);
    if (x_.rows <= kFewFloatRows) {
      multiply_.codes[tuning_.hint][x_.rows - 1](x_.data, x_.stride, w_.panel(p), depth() / kGroup,
                                                 tuning_.ahead, sums);
    } else {
      multiply(p, memory, sums);
    }
    finish(p, sums);
  }

 private:
  int64_t depth() const { return round_up(w_.k, kGroup); }

  // In blocks of K, each of which becomes floats once.
  void multiply(int64_t p, FloatPanelMemory& memory, float* sums) const {
    const int64_t block = floats_depth(tuning_), size = x_.rows * 2 * kPanel;
    float* floats = memory.floats.get<float>(block * kPanel);
    float* chains = memory.chains.get<float>(size);
    std::fill_n(chains, size, 0.f);
    for (int64_t k = 0; k < depth(); k += block) {
      const int64_t groups = std::min(block, depth() - k) / kGroup;
      multiply_.floats_of_codes(w_.panel(p) + k * kPanel, groups, floats);
      for_each_float_tile(x_.rows, [&](int64_t m, int64_t rows) {
        const FloatTile tile = {x_.data + m * x_.stride + k, x_.stride, floats, groups};
        multiply_.chains[rows - 1](tile, chains + m * 2 * kPanel);
      });
    }
    for (int64_t m = 0; m < x_.rows; ++m, chains += 2 * kPanel) {
      for (int n = 0; n < kPanel; ++n) *sums++ = chains[n] + chains[kPanel + n];
    }
  }

  void finish(int64_t p, const float* sums) const {
    static constexpr float kOne = 1.f;
    const int columns = columns_of(w_, p);
    FloatPanel panel = {};
    panel.has_bias = to_.bias != nullptr;
    std::copy_n(w_.scales(p), columns, panel.scale);
    if (panel.has_bias) std::copy_n(to_.bias + p * kPanel, columns, panel.bias);
    char* out = to_.data + p * kPanel * to_.element();
    const FloatEpilogueArgs args = {
        sums, static_cast<int>(x_.rows), columns, &kOne, 0, &panel, to_.activation, to_.dtype, out,
        w_.n};
    kernels_.sums->finish_floats(&args);
  }

  const Kernels& kernels_;
  const WeightOnlyKernels& multiply_;
  const Tuning& tuning_;
  const FloatRowsInMemory& x_;
  const PackedWeight& w_;
  const FloatOutput& to_;
};

void whole_linear(const Kernels& kernels, const Tuning& tuning, const FloatRowsInMemory& x,
                  const PackedWeight& w, const FloatOutput& to) {
  const FloatProduct product(kernels, tuning, x, w, to);
  parallel(w.panels(), kStepsPerProduct * x.rows * w.n * w.k, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) product.run(p);
  });
}

// Rows whose floats stay in the second cache while the panels pass by: they take as many bytes as a
// block of rows of kDepth codes.
int64_t rows_at_once(const Tuning& tuning, int64_t count, int64_t stride) {
  constexpr int64_t kDepth = 2048, kLeast = 4 * kMaxFloatRows;
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  const int64_t fits = tuning.block_rows * kDepth / std::max<int64_t>(1, bytes);
  const int64_t most = std::clamp(fits, kLeast, std::max(kLeast, tuning.block_rows));
  return even_part(count, most, kMaxFloatRows);
}

// An odd number of cache lines, so that the rows of a tile do not meet in the same sets.
int64_t stride_of(int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(float);
  return round_up(columns, kLine) | kLine;
}

}  // namespace

void linear_unquantized(const Kernels& kernels, const FloatMatrix& x, const Linear& linear) {
  const auto& [w, to] = linear;
  const Tuning tuning = tuning_of(format_for(kernels, Operands::kWide, 1));
  const int64_t stride = stride_of(x.columns), step = rows_at_once(tuning, x.rows, stride);
  for (int64_t first = 0; first < x.rows; first += step) {
    const int64_t count = std::min(step, x.rows - first);
    const FloatRowsInMemory rows = {padded_floats(kernels, x.part(first, count), stride), count,
                                    stride};
    FloatOutput part = to;
    part.data += first * w.shape().n * to.element();
    if (w.is_lowbit()) {
      lowbit_weight_linear(kernels, rows, w.few, part);
    } else {
      whole_linear(kernels, tuning, rows, w.whole, part);
    }
  }
}

}  // namespace qfx::cpu
