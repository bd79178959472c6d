// int8_mm, int8_linear, int8_linear_dynamic on the CPU.
#include "cpu/ops/linear.h"

#include <algorithm>
#include <utility>

#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

Tensor int8_mm(Tensor q, Tensor zero_point, Tensor packed, int64_t n) {
  constexpr const char* op = "int8_mm";
  check_dtype(op, "q", q, {ScalarType::Char});
  const Matrix size = matrix_of(op, "q", q);
  check_zero_point(op, zero_point, size.rows);
  const PackedWeight w = packed_of(op, &packed, q, size.columns, n);
  q = made_contiguous(q);
  zero_point = made_contiguous(zero_point);
  Tensor acc = empty_on_cpu(with_last(q, n), ScalarType::Int);
  if (acc.numel() == 0) return acc;  // of rows without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  const int64_t step = stride_of(zero_point);
  int32_t* out = static_cast<int32_t*>(acc.mutable_data_ptr());
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const CodeRows from(kernels, w, codes + first * w.k, zeros, step, count);
    gemm(from, w, IntegerSink(w, from.rows, out + first * w.n));
  });
  return acc;
}

void check_w_scale(const char* op, const Tensor& w_scale) {
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  check_vector(op, "w_scale", w_scale, w_scale.numel());
}

Tensor int8_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                   std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_linear";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_w_scale(op, w_scale);
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  check_zero_point(op, zero_point, size.rows);
  const PackedWeight w = packed_of(op, &packed, q, size.columns, w_scale.numel());
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  w_scale = made_contiguous(w_scale);
  Tensor y = empty_on_cpu(with_last(q, w.n), out_dtype);
  if (y.numel() == 0) return y;
  to.w_scale = floats(w_scale);
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  const int64_t step = stride_of(zero_point);
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const CodeRows from(kernels, w, codes + first * w.k, zeros, step, count);
    gemm(from, w, FloatSink(kernels, w, from.rows, to, floats(scale), stride_of(scale), first));
  });
  return y;
}

// The forward of a linear that trains: x, w, the steps and the transform are for gradients only
// (qfx/ops/ste.py).
Tensor int8_linear_ste(Tensor /*x*/, std::optional<Tensor> /*w*/, std::optional<Tensor> bias,
                       std::optional<Tensor> /*x_step*/, std::optional<Tensor> /*w_step*/, Tensor q,
                       Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                       std::vector<int64_t> /*w_axes*/, int64_t /*bits*/, int64_t /*w_bits*/,
                       bool /*symmetric*/, std::optional<Tensor> /*seed*/, ScalarType out_dtype,
                       std::optional<Tensor> /*factor*/, int64_t /*rotation*/) {
  return int8_linear(q, scale, zero_point, packed, w_scale, bias, "none", out_dtype);
}

Tensor int8_linear_dynamic(Tensor x, Tensor packed, Tensor w_scale, std::optional<Tensor> bias,
                           std::vector<int64_t> axes, int64_t bits, bool symmetric, Text activation,
                           ScalarType out_dtype, std::optional<Tensor> factor, int64_t rotation) {
  constexpr const char* op = "int8_linear_dynamic";
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  return linear_of_floats(
             op, x,
             {packed, w_scale, bias, spec, std::move(activation), out_dtype, factor, rotation})
      .y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_mm", &int8_mm>(m);
  implement<"int8_linear", &int8_linear>(m);
  implement<"int8_linear_ste", &int8_linear_ste>(m);
  implement<"int8_linear_dynamic", &int8_linear_dynamic>(m);
}

}  // namespace

LinearOfFloats linear_of_floats(const char* op, const Tensor& given, const DynamicLinear& how) {
  check_float(op, "x", given);
  check_w_scale(op, how.w_scale);
  const Matrix size = matrix_of(op, "x", given);
  Tensor packed = how.packed;
  const PackedWeight w = packed_of(op, &packed, given, size.columns, how.w_scale.numel());
  check_cpu_transform(op, given, size, how.factor, how.rotation);
  FloatOutput to = {nullptr, bias_of(op, how.bias, w.n), activation_of(op, how.activation),
                    dtype_of(op, how.out_dtype), nullptr};
  const Tensor x = made_contiguous(given), w_scale = made_contiguous(how.w_scale);
  const std::optional<Tensor> factor = made_contiguous(how.factor);
  thread_local Scratch scratch;
  float* scales = scratch.get<float>(w.n == 0 ? 1 : std::max<int64_t>(size.rows, 1));
  Tensor y = empty_on_cpu(with_last(x, w.n), how.out_dtype);
  if (y.numel() == 0) return {y, x, nullptr};
  to.w_scale = floats(w_scale);
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, how.rotation);
  const Linear all[] = {{w, to}};
  linears_of_rows(kernels_of(current_isa()), matrix, how.spec, all, scales);
  return {y, x, scales};
}

}  // namespace qfx::cpu
