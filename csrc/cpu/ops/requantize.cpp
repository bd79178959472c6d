// linear_requantize on the CPU: a linear whose output is codes for a following int8 linear.
#include <algorithm>
#include <atomic>
#include <bit>
#include <tuple>

#include "cpu/core/scratch.h"
#include "cpu/gemm/product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int32_t kInfinity = 0x7f800000;

// Where the codes go, and how each row becomes codes.
struct CodeOutput {
  int8_t* q;  // [M, N]
  const RowCode* codes;
  std::atomic<int32_t>* faults;  // the greatest magnitude of each row that is not finite, or 0
};

// The epilogue (E1) in float32, then (Q6), while the tile is in cache.
struct CodeSink final : TileSink {
  const Kernels& kernels;
  const PackedWeight& w;
  const Rows& rows;
  const FloatOutput& linear;
  const CodeOutput& to;
  const float* row_scale;
  int64_t scale_stride, first;

  CodeSink(const Kernels& kernels, const PackedWeight& w, const Rows& rows,
           const FloatOutput& linear, const CodeOutput& to, const float* row_scale,
           int64_t scale_stride, int64_t first)
      : kernels(kernels),
        w(w),
        rows(rows),
        linear(linear),
        to(to),
        row_scale(row_scale),
        scale_stride(scale_stride),
        first(first) {}

  void load_panel(int64_t p, Panel* panel) const override { load_columns(w, linear, p, panel); }

  void tile(const int32_t* raw, int64_t m, int count, int64_t p,
            const Panel& panel) const override {
    alignas(64) float y[kMaxTileRows * kPanel];
    const int columns = static_cast<int>(std::min<int64_t>(kPanel, w.n - p * kPanel));
    const float* scale = row_scale + (first + m) * scale_stride;
    const EpilogueArgs args = {raw,   count,        columns, rows.add + m,      rows.mul + m,
                               scale, scale_stride, &panel,  linear.activation, Dtype::kFloat32,
                               y,     kPanel};
    kernels.sums->epilogue(&args);
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + m + r;
      int8_t* q = to.q + row * w.n + p * kPanel;
      kernels.row->quantize_clamped(y + r * kPanel, columns, &to.codes[row], q);
      Range range;
      kernels.row->range(y + r * kPanel, columns, &range);
      if (range.magnitude >= kInfinity) report(range.magnitude, &to.faults[row]);
    }
  }

  static void report(int32_t magnitude, std::atomic<int32_t>* fault) {
    int32_t seen = *fault;
    while (seen < magnitude && !fault->compare_exchange_weak(seen, magnitude)) {
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> linear_requantize(Tensor q, Tensor scale, Tensor zero_point,
                                                     Tensor weight, std::vector<int64_t> layout,
                                                     std::optional<Tensor> bias, Text activation,
                                                     Tensor out_scale,
                                                     std::optional<Tensor> out_zero_point,
                                                     std::vector<int64_t> out_code) {
  constexpr const char* op = "linear_requantize";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_dtype(op, "out_scale", out_scale, {ScalarType::Float});
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  check_per_row(op, "out_scale", out_scale, size.rows);
  check_zero_point(op, zero_point, size.rows);
  if (out_zero_point.has_value()) check_zero_point(op, *out_zero_point, size.rows);
  const ActivationCode code = activation_code_of(op, out_code);
  STD_TORCH_CHECK(code.group == 0 && code.rotation == 0, op, ": out_code has group=", code.group,
                  " and rotation=", code.rotation, ", expected 0 for both");
  const CodeSpec spec = {code.spec.bits, code.spec.symmetric, false};
  const Weight opened = weight_of(op, &weight, q, size.columns, layout);
  STD_TORCH_CHECK(opened.one_scale(), op,
                  ": the weight has groups, zero points or few bits, expected one scale a row");
  const PackedWeight& w = opened.whole;
  const FloatOutput linear = {bias_of(op, bias, w.n), activation_of(op, activation),
                              Dtype::kFloat32, nullptr};
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  out_scale = made_contiguous(out_scale);
  out_zero_point = made_contiguous(out_zero_point);
  Tensor out_q = empty_on_cpu(with_last(q, w.n), ScalarType::Char);
  Tensor row_scale = empty_on_cpu(with_last(q, 1), ScalarType::Float);
  Tensor row_zero = empty_on_cpu(with_last(q, 1), ScalarType::Int);

  thread_local Scratch codes_scratch, faults_scratch;
  RowCode* codes = codes_scratch.get<RowCode>(std::max<int64_t>(size.rows, 1));
  auto* faults = faults_scratch.get<std::atomic<int32_t>>(std::max<int64_t>(size.rows, 1));
  for (int64_t m = 0; m < size.rows; ++m) {
    const int32_t zero = out_zero_point ? ints(*out_zero_point)[m * stride_of(*out_zero_point)] : 0;
    codes[m] = given_code(spec, floats(out_scale)[m * stride_of(out_scale)], zero);
    faults[m] = 0;
  }
  const CodeOutput to = {static_cast<int8_t*>(out_q.mutable_data_ptr()), codes, faults};
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* in = static_cast<const int8_t*>(q.const_data_ptr());
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int64_t step = stride_of(zero_point);
    const CodeRows from(kernels, w, in + first * w.k, ints(zero_point) + first * step, step, count);
    gemm(from, w,
         CodeSink(kernels, w, from.rows, linear, to, floats(scale), stride_of(scale), first));
  });
  float* scales = static_cast<float*>(row_scale.mutable_data_ptr());
  int32_t* zeros = static_cast<int32_t*>(row_zero.mutable_data_ptr());
  for (int64_t m = 0; m < size.rows; ++m) {
    const int32_t fault = faults[m];
    scales[m] = fault != 0 ? std::bit_cast<float>(fault) : codes[m].scale;
    zeros[m] = fault != 0 ? 0 : codes[m].zero_point;
    if (fault != 0) std::fill_n(to.q + m * w.n, w.n, int8_t{0});
  }
  return {out_q, row_scale, row_zero};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"linear_requantize", &linear_requantize>(m); }

}  // namespace
}  // namespace qfx::cpu
