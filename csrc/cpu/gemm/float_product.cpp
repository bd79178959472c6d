// Float activations times codes, for a few rows.
#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/lowbit_product.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kFloatsAtOnce = 4 << 20;  // of activations, whose memory stays bounded
constexpr int64_t kStepsPerProduct = 4;     // in parallel.h's unit

// One panel for all rows: its weights are read from memory once.
void run_panel(const Kernels& kernels, const Tuning& tuning, const FloatRowsInMemory& x,
               const PackedWeight& w, int64_t p, const FloatOutput& to) {
  const int columns = columns_of(w, p);
  const int64_t groups = x.stride / kGroup;
  static constexpr float kOne = 1.f;
  FloatPanel panel = {};
  panel.has_bias = to.bias != nullptr;
  std::copy_n(w.scales(p), columns, panel.scale);
  if (panel.has_bias) std::copy_n(to.bias + p * kPanel, columns, panel.bias);
  const auto multiply = kernels.sums->weight_only[tuning.hint];
  float sums[kPanel];
  for (int64_t m = 0; m < x.rows; ++m) {
    multiply(x.data + m * x.stride, w.panel(p), groups, tuning.ahead, sums);
    char* out = to.data + (m * w.n + p * kPanel) * to.element();
    const FloatEpilogueArgs args = {sums,          1,        columns, &kOne, 0, &panel,
                                    to.activation, to.dtype, out,     w.n};
    kernels.sums->finish_floats(&args);
  }
}

void whole_linear(const Kernels& kernels, const FloatRowsInMemory& x, const PackedWeight& w,
                  const FloatOutput& to) {
  const Tuning tuning = tuning_of(format_for(kernels, Operands::kWide, 1));
  parallel(w.panels(), kStepsPerProduct * x.rows * w.n * w.k, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) run_panel(kernels, tuning, x, w, p, to);
  });
}

// For low-bit weights so many that the sums of a panel stay in the first cache.
int64_t rows_at_once(const Weight& w, int64_t stride) {
  constexpr int64_t kOfFewBits = 64;
  if (w.is_lowbit()) return kOfFewBits;
  return std::max<int64_t>(1, kFloatsAtOnce / std::max<int64_t>(1, stride));
}

}  // namespace

void linear_unquantized(const Kernels& kernels, const FloatMatrix& x, const Linear& linear) {
  const auto& [w, to] = linear;
  const int64_t stride = round_up(x.columns, kGroup), step = rows_at_once(w, stride);
  for (int64_t first = 0; first < x.rows; first += step) {
    const int64_t count = std::min(step, x.rows - first);
    const FloatRowsInMemory rows = {padded_floats(kernels, x.part(first, count), stride), count,
                                    stride};
    FloatOutput part = to;
    part.data += first * w.shape().n * to.element();
    if (w.is_lowbit()) {
      lowbit_weight_linear(kernels, rows, w.few, part);
    } else {
      whole_linear(kernels, rows, w.whole, part);
    }
  }
}

}  // namespace qfx::cpu
