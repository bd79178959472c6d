// quantize, dequantize, pack_weight, unpack_weight on the CPU.
#include <algorithm>
#include <tuple>

#include "cpu/core/parallel.h"
#include "cpu/gemm/whole.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of a pass over memory, in parallel.h's unit

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor x, std::vector<int64_t> axes, int64_t bits,
                                            bool symmetric, std::optional<Tensor> factor,
                                            int64_t rotation) {
  constexpr const char* op = "quantize";
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  check_cpu_transform(op, x, size, factor, rotation);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, rotation);
  Tensor q = empty_on_cpu(with_last(x, size.columns), ScalarType::Char);
  const std::vector<int64_t> shape = with_last(x, 1);
  Tensor scale = empty_on_cpu(shape, ScalarType::Float);
  Tensor zero_point = empty_on_cpu(shape, ScalarType::Int);

  const Kernels& kernels = kernels_of(current_isa());
  int8_t* codes = static_cast<int8_t*>(q.mutable_data_ptr());
  float* scales = static_cast<float*>(scale.mutable_data_ptr());
  int32_t* zeros = static_cast<int32_t*>(zero_point.mutable_data_ptr());
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, matrix, spec, scales);
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    RowCode row_codes[kRowsAtOnce];
    for (int64_t m = begin; m < end; m += kRowsAtOnce) {
      const int64_t count = std::min<int64_t>(kRowsAtOnce, end - m);
      quantize_rows(kernels, matrix, spec, spec.per_tensor ? &shared : nullptr, m, count, row_codes,
                    codes + m * size.columns, size.columns);
      for (int64_t r = 0; r < count; ++r) {
        scales[m + r] = row_codes[r].scale;
        zeros[m + r] = row_codes[r].zero_point;
      }
    }
  });
  return {q, scale, zero_point};
}

std::tuple<Tensor, Tensor, Tensor> quantize_groups(Tensor x, int64_t group, int64_t bits,
                                                   bool symmetric, std::optional<Tensor> factor,
                                                   int64_t rotation) {
  constexpr const char* op = "quantize_groups";
  check_float(op, "x", x);
  check_group(op, group);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, {1}, bits, symmetric);
  check_cpu_transform(op, x, size, factor, rotation);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, rotation);
  const int64_t groups = (size.columns + group - 1) / group;
  Tensor q = empty_on_cpu(with_last(x, size.columns), ScalarType::Char);
  Tensor scale = empty_on_cpu(with_last(x, groups), ScalarType::Float);
  Tensor zero_point = empty_on_cpu(with_last(x, groups), ScalarType::Int);
  if (groups == 0) return {q, scale, zero_point};  // of rows without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  int8_t* codes = static_cast<int8_t*>(q.mutable_data_ptr());
  float* scales = static_cast<float*>(scale.mutable_data_ptr());
  int32_t* zeros = static_cast<int32_t*>(zero_point.mutable_data_ptr());
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const GroupCodes to = {codes + m * size.columns, scales + m * groups, zeros + m * groups};
      quantize_row_in_groups(kernels, matrix, m, spec, group, to);
    }
  });
  return {q, scale, zero_point};
}

std::tuple<Tensor, Tensor, Tensor> quantize_static(Tensor x, Tensor scale,
                                                   std::optional<Tensor> zero_point, int64_t bits,
                                                   bool symmetric, std::optional<Tensor> factor,
                                                   int64_t rotation) {
  constexpr const char* op = "quantize_static";
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, {1}, bits, symmetric);
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_per_row(op, "scale", scale, size.rows);
  if (zero_point.has_value()) check_zero_point(op, *zero_point, size.rows);
  check_cpu_transform(op, x, size, factor, rotation);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  const int32_t* given_zeros = zero_point.has_value() ? ints(*zero_point) : nullptr;
  const int64_t zero_step = zero_point.has_value() ? stride_of(*zero_point) : 0;
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, rotation);
  Tensor q = empty_on_cpu(with_last(x, size.columns), ScalarType::Char);
  Tensor row_scale = empty_on_cpu(with_last(x, 1), ScalarType::Float);
  Tensor row_zero = empty_on_cpu(with_last(x, 1), ScalarType::Int);
  const Kernels& kernels = kernels_of(current_isa());
  const float* given = static_cast<const float*>(scale.const_data_ptr());
  const int64_t step = scale.numel() == 1 ? 0 : 1;
  int8_t* codes = static_cast<int8_t*>(q.mutable_data_ptr());
  float* scales = static_cast<float*>(row_scale.mutable_data_ptr());
  int32_t* zeros = static_cast<int32_t*>(row_zero.mutable_data_ptr());
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int32_t zero = given_zeros ? given_zeros[m * zero_step] : 0;
      Range range;
      const float* row = row_as_floats(kernels, matrix, m, &range);
      const RowCode code = given_row_code(range, spec, given[m * step], zero);
      kernels.row->quantize_clamped(row, size.columns, &code, codes + m * size.columns);
      scales[m] = code.scale;
      zeros[m] = code.zero_point;
    }
  });
  return {q, row_scale, row_zero};
}

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

Tensor pack_weight(Tensor w, int64_t group) {
  constexpr const char* op = "pack_weight";
  check_cpu(op, "w", w);
  check_weight(op, w, group);
  const int64_t n = w.size(0), k = w.size(1);
  const int64_t size = packed_size(n, k, group);
  Tensor packed = empty_packed(size);
  int8_t* out = static_cast<int8_t*>(packed.mutable_data_ptr());
  const int8_t* codes = static_cast<const int8_t*>(w.const_data_ptr());
  know_whole(out, pack(codes, n, k, w.stride(0), w.stride(1), out, group));
  return packed;
}

Tensor unpack_weight(Tensor packed, int64_t n, int64_t k) {
  constexpr const char* op = "unpack_weight";
  const PackedWeight weight = packed_of(op, &packed, packed, k, n);
  const int8_t* data = static_cast<const int8_t*>(packed.const_data_ptr());
  const std::string fault = fault_of_contents(data, packed.numel(), weight.contents);
  STD_TORCH_CHECK(fault.empty(), op, ": not a packed weight of this build: ", fault);
  Tensor w = empty_on_cpu({n, k}, ScalarType::Char);
  unpack(weight, static_cast<int8_t*>(w.mutable_data_ptr()));
  return w;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"quantize", &quantize>(m);
  implement<"quantize_groups", &quantize_groups>(m);
  implement<"quantize_static", &quantize_static>(m);
  implement<"fake_quantize", &fake_quantize>(m);
  implement<"dequantize", &dequantize>(m);
  implement<"pack_weight", &pack_weight>(m);
  implement<"unpack_weight", &unpack_weight>(m);
}

}  // namespace
}  // namespace qfx::cpu
