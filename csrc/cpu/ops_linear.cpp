// int8_mm, int8_linear, int8_linear_dynamic on the CPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "cpu/arguments.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of quantizing and arranging, in parallel.h's unit

void load_colsum(const PackedWeight& w, int64_t p, Panel* panel) {
  std::memcpy(panel->colsum, w.colsum + p * kPanel, sizeof(panel->colsum));
}

int columns_of(const PackedWeight& w, int64_t p) {
  return static_cast<int>(std::min<int64_t>(kPanel, w.n - p * kPanel));
}

// Stores the exact sums.
struct IntegerSink final : TileSink {
  const PackedWeight& w;
  const Rows& rows;
  int32_t* out;

  IntegerSink(const PackedWeight& w, const Rows& rows, int32_t* out) : w(w), rows(rows), out(out) {}

  void load_panel(int64_t p, Panel* panel) const override { load_colsum(w, p, panel); }

  void tile(const int32_t* raw, int64_t m, int count, int64_t p,
            const Panel& panel) const override {
    for (int r = 0; r < count; ++r, ++m, raw += kPanel) {
      const uint32_t add = static_cast<uint32_t>(rows.add[m]),
                     mul = static_cast<uint32_t>(rows.mul[m]);
      for (int n = 0; n < columns_of(w, p); ++n) {
        const uint32_t colsum = static_cast<uint32_t>(panel.colsum[n]);
        out[m * w.n + p * kPanel + n] =
            static_cast<int32_t>(static_cast<uint32_t>(raw[n]) + add - mul * colsum);
      }
    }
  }
};

// Where and how an operator's float result is written.
struct FloatOutput {
  const float* w_scale;
  std::vector<float> bias;
  Activation activation;
  Dtype dtype;
  char* data;  // [M, N]

  int64_t element() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
};

// Applies the epilogue (E1) while the tile is in cache. `first` is the output row of rows' row 0.
struct FloatSink final : TileSink {
  const Kernels& kernels;
  const PackedWeight& w;
  const Rows& rows;
  const FloatOutput& to;
  const float* row_scale;
  int64_t scale_stride, first;

  FloatSink(const Kernels& kernels, const PackedWeight& w, const Rows& rows, const FloatOutput& to,
            const float* row_scale, int64_t scale_stride, int64_t first)
      : kernels(kernels),
        w(w),
        rows(rows),
        to(to),
        row_scale(row_scale),
        scale_stride(scale_stride),
        first(first) {}

  void load_panel(int64_t p, Panel* panel) const override {
    load_colsum(w, p, panel);
    panel->has_bias = !to.bias.empty();
    const int columns = columns_of(w, p);
    for (int n = 0; n < kPanel; ++n) {
      panel->scale[n] = n < columns ? to.w_scale[p * kPanel + n] : 0.f;
      panel->bias[n] = n < columns && panel->has_bias ? to.bias[p * kPanel + n] : 0.f;
    }
  }

  void tile(const int32_t* raw, int64_t m, int count, int64_t p,
            const Panel& panel) const override {
    char* out = to.data + ((first + m) * w.n + p * kPanel) * to.element();
    const float* scale = row_scale + (first + m) * scale_stride;
    const EpilogueArgs args = {raw,   count,        columns_of(w, p), rows.add + m,  rows.mul + m,
                               scale, scale_stride, &panel,           to.activation, to.dtype,
                               out,   w.n};
    kernels.epilogue(&args);
  }
};

// Arranges codes q [M, K] for the kernels.
Rows rows_of_codes(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
                   const int32_t* zero_points, int64_t zero_stride, int64_t count) {
  const Rows rows = make_rows(kernels, count, w.padded_k);
  parallel(count, count * w.k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      arrange_row(kernels, w, q + m * w.k, zero_points[m * zero_stride], m, rows);
    }
  });
  return rows;
}

// Quantizes x [M, K] row by row and arranges the codes. Each row has its own code, which is chosen
// here and whose scale goes to scales[m]; or all have `shared`.
Rows rows_of_floats(const Kernels& kernels, const PackedWeight& w, const FloatMatrix& x,
                    const CodeSpec& spec, const RowCode* shared, float* scales) {
  const Rows rows = make_rows(kernels, x.rows, w.padded_k);
  parallel(x.rows, x.rows * w.k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    int8_t* q = scratch.get<int8_t>(w.k);
    for (int64_t m = begin; m < end; ++m) {
      const RowCode code = shared != nullptr ? *shared : choose_row_code(kernels, x, spec, m);
      quantize_row_of(kernels, x, m, code, q);
      arrange_row(kernels, w, q, code.zero_point, m, rows);
      if (shared == nullptr) scales[m] = code.scale;
    }
  });
  return rows;
}

// Runs f(first, count) over the rows, a bounded number at a time, so that the memory for arranged
// rows stays bounded too.
template <typename F>
void in_chunks(const Kernels& kernels, const PackedWeight& w, int64_t rows, const F& f) {
  const int64_t step = rows_at_once(kernels, w);
  for (int64_t first = 0; first < rows; first += step) f(first, std::min(step, rows - first));
}

void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows) {
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  check_per_row(op, "zero_point", zero_point, rows);
}

int64_t stride_of(const Tensor& per_row) { return per_row.numel() == 1 ? 0 : 1; }

const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); }

const float* floats(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }

Tensor int8_mm(Tensor q, Tensor zero_point, Tensor packed, int64_t n) {
  constexpr const char* op = "int8_mm";
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  check_zero_point(op, zero_point, size.rows);
  packed = torch::stable::contiguous(packed);
  const PackedWeight w = packed_of(op, packed, q, size.columns, n);
  q = torch::stable::contiguous(q);
  zero_point = torch::stable::contiguous(zero_point);
  Tensor acc = empty_on_cpu(with_last(q, n), ScalarType::Int);
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  const int64_t step = stride_of(zero_point);
  int32_t* out = static_cast<int32_t*>(acc.mutable_data_ptr());
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const Rows rows = rows_of_codes(kernels, w, codes + first * w.k, zeros, step, count);
    gemm(kernels, rows, w, IntegerSink(w, rows, out + first * w.n));
  });
  return acc;
}

void check_w_scale(const char* op, const Tensor& w_scale) {
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  check_vector(op, "w_scale", w_scale, w_scale.numel());
}

Tensor int8_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                   std::optional<Tensor> bias, std::string activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_linear";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_w_scale(op, w_scale);
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  check_zero_point(op, zero_point, size.rows);
  packed = torch::stable::contiguous(packed);
  const PackedWeight w = packed_of(op, packed, q, size.columns, w_scale.numel());
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  q = torch::stable::contiguous(q);
  scale = torch::stable::contiguous(scale);
  zero_point = torch::stable::contiguous(zero_point);
  w_scale = torch::stable::contiguous(w_scale);
  Tensor y = empty_on_cpu(with_last(q, w.n), out_dtype);
  to.w_scale = floats(w_scale);
  to.data = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  const int64_t step = stride_of(zero_point);
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const Rows rows = rows_of_codes(kernels, w, codes + first * w.k, zeros, step, count);
    gemm(kernels, rows, w, FloatSink(kernels, w, rows, to, floats(scale), stride_of(scale), first));
  });
  return y;
}

// The forward of a linear that trains: x, w and the steps only carry gradients (qfx/ops/ste.py).
Tensor int8_linear_ste(Tensor /*x*/, std::optional<Tensor> /*w*/, std::optional<Tensor> bias,
                       std::optional<Tensor> /*x_step*/, std::optional<Tensor> /*w_step*/, Tensor q,
                       Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                       std::vector<int64_t> /*w_axes*/, int64_t /*bits*/, int64_t /*w_bits*/,
                       bool /*symmetric*/, std::optional<Tensor> /*seed*/, ScalarType out_dtype) {
  return int8_linear(q, scale, zero_point, packed, w_scale, bias, "none", out_dtype);
}

Tensor int8_linear_dynamic(Tensor x, Tensor packed, Tensor w_scale, std::optional<Tensor> bias,
                           std::vector<int64_t> axes, int64_t bits, bool symmetric,
                           std::string activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_linear_dynamic";
  check_float(op, "x", x);
  check_w_scale(op, w_scale);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  packed = torch::stable::contiguous(packed);
  const PackedWeight w = packed_of(op, packed, x, size.columns, w_scale.numel());
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  x = torch::stable::contiguous(x);
  w_scale = torch::stable::contiguous(w_scale);
  Tensor y = empty_on_cpu(with_last(x, w.n), out_dtype);
  to.w_scale = floats(w_scale);
  to.data = static_cast<char*>(y.mutable_data_ptr());
  FloatMatrix matrix = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, size.columns};
  const Kernels& kernels = kernels_of(current_isa());
  RowCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, matrix, spec);
  thread_local Scratch scratch;
  float* scales = scratch.get<float>(std::max<int64_t>(size.rows, 1));
  if (spec.per_tensor) scales[0] = shared.scale;
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const FloatMatrix chunk = {matrix.row(first), matrix.dtype, count, matrix.columns};
    const RowCode* same = spec.per_tensor ? &shared : nullptr;
    const Rows rows = rows_of_floats(kernels, w, chunk, spec, same, scales + first);
    gemm(kernels, rows, w, FloatSink(kernels, w, rows, to, scales, spec.per_tensor ? 0 : 1, first));
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  m.impl("int8_mm", TORCH_BOX(&int8_mm));
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("int8_linear_ste", TORCH_BOX(&int8_linear_ste));
  m.impl("int8_linear_dynamic", TORCH_BOX(&int8_linear_dynamic));
}

}  // namespace
}  // namespace qfx::cpu
