// dequantize and fake_quantize on the CPU.
#include <algorithm>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of a pass over memory, in parallel.h's unit

int64_t panels_for(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// A row of a tile: in place where it is one already, else widened into `copy`.
const int32_t* as_tile(const int32_t* from, int columns, int32_t* copy) {
  if (columns == kPanel) return from;
  std::copy(from, from + columns, copy);
  return copy;
}

const int32_t* as_tile(const int8_t* from, int columns, int32_t* copy) {
  std::copy(from, from + columns, copy);
  return copy;
}

// One row of (E1) in panels: raw sums are the codes or sums themselves, minus the zero point.
// Consecutive rows share `rows_a_scale` of the column scales.
struct Dequantize {
  const Kernels& kernels;
  const std::vector<Panel>& panels;
  int64_t rows_a_scale;
  Matrix size;
  Activation activation;
  Dtype dtype;
  char* out;

  template <typename T>
  void row(const T* q, int64_t m, float scale, int32_t zero_point) const {
    const int64_t element = dtype == Dtype::kFloat32 ? 4 : 2;
    const int32_t add = static_cast<int32_t>(-static_cast<uint32_t>(zero_point)), mul = 0;
    int32_t copy[kPanel] = {};
    const Panel* panel = panels.data() + m / rows_a_scale * panels_for(size.columns);
    for (int64_t n = 0; n < size.columns; n += kPanel, ++panel) {
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, size.columns - n));
      const int32_t* tile = as_tile(q + m * size.columns + n, columns, copy);
      const EpilogueArgs args = {tile,
                                 1,
                                 columns,
                                 &add,
                                 &mul,
                                 &scale,
                                 0,
                                 panel,
                                 activation,
                                 dtype,
                                 out + (m * size.columns + n) * element,
                                 size.columns};
      kernels.sums->epilogue(&args);
    }
  }
};

// Panels of each of `count` rows of column scales [count, n], one row of ones without them.
std::vector<Panel> panels_of(const float* col_scale, int64_t count, const float* bias, int64_t n) {
  std::vector<Panel> panels(count * panels_for(n));
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < n; ++i) {
      Panel& panel = panels[row * panels_for(n) + i / kPanel];
      panel.scale[i % kPanel] = col_scale ? col_scale[row * n + i] : 1.f;
      panel.bias[i % kPanel] = bias == nullptr ? 0.f : bias[i];
      panel.has_bias = bias != nullptr;
    }
  }
  return panels;
}

Tensor dequantize(Tensor q, Tensor scale, std::optional<Tensor> zero_point,
                  std::optional<Tensor> col_scale, std::optional<Tensor> bias, Text activation,
                  ScalarType out_dtype) {
  constexpr const char* op = "dequantize";
  check_dtype(op, "q", q, {ScalarType::Char, ScalarType::Int});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  if (zero_point.has_value()) {
    check_dtype(op, "zero_point", *zero_point, {ScalarType::Int});
    STD_TORCH_CHECK(zero_point->numel() == scale.numel(), op, ": zero_point has ",
                    zero_point->numel(), " elements but scale has ", scale.numel());
  }
  int64_t rows_a_scale = std::max<int64_t>(size.rows, 1);
  if (col_scale.has_value()) {
    check_cpu(op, "col_scale", *col_scale);
    check_col_scale(op, *col_scale, q);
    if (col_scale->dim() > 1) rows_a_scale = std::max<int64_t>(q.size(q.dim() - 2), 1);
  }
  check_bias(op, bias, size.columns);
  const Dtype dtype = dtype_of(op, out_dtype);
  const Activation chosen = activation_of(op, activation);
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  col_scale = made_contiguous(col_scale);
  const int32_t* zeros = zero_point.has_value() ? ints(*zero_point) : nullptr;
  const float* col_scales = col_scale.has_value() ? floats(*col_scale) : nullptr;
  const float* biases = bias_of(op, bias, size.columns);
  Tensor y = empty_on_cpu(with_last(q, size.columns), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  const int64_t scale_rows = (size.rows + rows_a_scale - 1) / rows_a_scale;
  const std::vector<Panel> panels = panels_of(col_scales, scale_rows, biases, size.columns);
  const Dequantize job = {kernels_of(current_isa()),
                          panels,
                          rows_a_scale,
                          size,
                          chosen,
                          dtype,
                          static_cast<char*>(y.mutable_data_ptr())};
  const float* scales = static_cast<const float*>(scale.const_data_ptr());
  const bool codes = q.scalar_type() == ScalarType::Char;
  const void* data = q.const_data_ptr();
  const int64_t step = scale.numel() == 1 ? 0 : 1;
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int32_t zero = zeros ? zeros[m * step] : 0;
      if (codes) job.row(static_cast<const int8_t*>(data), m, scales[m * step], zero);
      if (!codes) job.row(static_cast<const int32_t*>(data), m, scales[m * step], zero);
    }
  });
  return y;
}

Tensor fake_quantize(Tensor x, std::vector<int64_t> axes, int64_t bits, bool symmetric,
                     ScalarType out_dtype) {
  constexpr const char* op = "fake_quantize";
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const Dtype dtype = dtype_of(op, out_dtype);
  x = made_contiguous(x);
  const FloatMatrix matrix = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows,
                              size.columns};
  Tensor y = empty_on_cpu(with_last(x, size.columns), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  TensorCode shared{};
  std::vector<float> scales(spec.per_tensor ? size.rows : 0);
  if (spec.per_tensor) shared = choose_tensor_code(kernels, matrix, spec, scales.data());
  const std::vector<Panel> panels = panels_of(nullptr, 1, nullptr, size.columns);
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_bytes = size.columns * (dtype == Dtype::kFloat32 ? 4 : 2);
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    std::vector<int8_t> q(size.columns);
    for (int64_t m = begin; m < end; ++m) {
      const RowCode code =
          spec.per_tensor ? shared.of(m) : choose_row_code(kernels, matrix, spec, m);
      quantize_row_of(kernels, matrix, m, code, q.data());
      const Dequantize row = {
          kernels, panels, 1, {1, size.columns}, Activation::kNone, dtype, out + m * row_bytes};
      row.row(q.data(), 0, code.scale, code.zero_point);
    }
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"dequantize", &dequantize>(m);
  implement<"fake_quantize", &fake_quantize>(m);
}

}  // namespace
}  // namespace qfx::cpu
