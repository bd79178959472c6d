// int8_weight_linear on the CPU: float activations times int8 weights, for a few rows.
#include <algorithm>
#include <cstring>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kFloatsAtOnce = 4 << 20;  // of activations, whose memory stays bounded
constexpr int64_t kStepsPerProduct = 4;     // in parallel.h's unit

// One panel for all rows: its weights are read from memory once.
void run_panel(const Kernels& kernels, const Tuning& tuning, const float* x, int64_t rows,
               const PackedWeight& w, int64_t p, const FloatOutput& to) {
  constexpr float kOne = 1.f;
  const int columns = static_cast<int>(std::min<int64_t>(kPanel, w.n - p * kPanel));
  const int64_t groups = (w.k + kGroup - 1) / kGroup;
  FloatPanel panel = {};
  panel.has_bias = to.bias != nullptr;
  std::copy_n(to.w_scale + p * kPanel, columns, panel.scale);
  if (panel.has_bias) std::copy_n(to.bias + p * kPanel, columns, panel.bias);
  const auto multiply = kernels.sums->weight_only[tuning.hint];
  float sums[kPanel];
  for (int64_t m = 0; m < rows; ++m) {
    multiply(x + m * groups * kGroup, w.panel(p), groups, tuning.ahead, sums);
    char* out = to.data + (m * w.n + p * kPanel) * to.element();
    const FloatEpilogueArgs args = {sums,          1,        columns, &kOne, 0, &panel,
                                    to.activation, to.dtype, out,     w.n};
    kernels.sums->finish_floats(&args);
  }
}

Tensor int8_weight_linear(Tensor x, Tensor packed, Tensor w_scale, std::optional<Tensor> bias,
                          Text activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_weight_linear";
  check_float(op, "x", x);
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  check_vector(op, "w_scale", w_scale, w_scale.numel());
  const Matrix size = matrix_of(op, "x", x);
  const PackedWeight w = packed_of(op, &packed, x, size.columns, w_scale.numel());
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  x = made_contiguous(x);
  w_scale = made_contiguous(w_scale);
  Tensor y = empty_on_cpu(with_last(x, w.n), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  to.w_scale = floats(w_scale);
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  const Tuning tuning = tuning_of(format_for(kernels, Operands::kWide, 1));
  const FloatMatrix all = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, w.k};
  const int64_t stride = round_up(w.k, kGroup);
  const int64_t step = std::max<int64_t>(1, kFloatsAtOnce / std::max<int64_t>(1, stride));
  for (int64_t first = 0; first < size.rows; first += step) {
    const int64_t rows = std::min(step, size.rows - first);
    const FloatMatrix part = {all.row(first), all.dtype, rows, all.columns};
    const float* floats = padded_floats(kernels, part, stride);
    to.data = out + first * w.n * to.element();
    parallel(w.panels(), kStepsPerProduct * rows * w.n * w.k, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) run_panel(kernels, tuning, floats, rows, w, p, to);
    });
  }
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"int8_weight_linear", &int8_weight_linear>(m); }

}  // namespace
}  // namespace qfx::cpu
