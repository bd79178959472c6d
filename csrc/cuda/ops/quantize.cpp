// quantize, fake_quantize, rotate on CUDA.
#include <tuple>

#include "cuda/ops/arguments.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

using Quantized = std::tuple<Tensor, Tensor, Tensor>;

Codes codes_of(Quantized& made, const SharedCode& shared = {}) {
  auto& [q, scale, zero_point] = made;
  return {data_of<int8_t>(q), data_of<float>(scale), data_of<int32_t>(zero_point), shared.code};
}

Quantized empty_codes(const Tensor& x) {
  const std::vector<int64_t> shape = with_last(x, 1);
  const std::vector<int64_t> all(x.sizes().begin(), x.sizes().end());
  return {empty_beside(x, all, ScalarType::Char), empty_beside(x, shape, ScalarType::Float),
          empty_beside(x, shape, ScalarType::Int)};
}

void check_static(const char* op, const Tensor& scale, const std::optional<Tensor>& zero_point,
                  int64_t rows) {
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_per_row(op, "scale", scale, rows);
  if (!zero_point.has_value()) return;
  check_dtype(op, "zero_point", *zero_point, {ScalarType::Int});
  check_per_row(op, "zero_point", *zero_point, rows);
}

void check_stochastic(const char* op, const Tensor& seed, const ActivationCode& code,
                      bool is_static) {
  check_dtype(op, "seed", seed, {ScalarType::Long});
  STD_TORCH_CHECK(seed.numel() == 1, op, ": seed has shape ", shape_of(seed),
                  ", expected a single element");
  STD_TORCH_CHECK(!is_static, op, ": both a scale and a seed are given, expected one of them");
  STD_TORCH_CHECK(code.spec.symmetric && code.rotation == 0, op,
                  ": rounding at random is for symmetric codes and no rotation");
}

// (Q6) with `scale`, (Q7) with `seed`, else (Q1) to (Q4).
Quantized quantize(Tensor x, std::vector<int64_t> given_code, std::optional<Tensor> scale,
                   std::optional<Tensor> zero_point, std::optional<Tensor> seed,
                   std::optional<Tensor> factor) {
  constexpr const char* op = "quantize";
  const OnDevice device(op, x, scale, zero_point, seed, factor);
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const ActivationCode code = row_code_of(op, given_code);
  STD_TORCH_CHECK(scale.has_value() || !zero_point.has_value(), op,
                  ": zero_point is given without a scale");
  if (scale.has_value()) check_static(op, *scale, zero_point, size.rows);
  if (seed.has_value()) check_stochastic(op, *seed, code, scale.has_value());
  check_transform(op, x, size, factor, code.rotation);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  x = made_rows(op, x, device.stream());
  factor = made_contiguous(factor);
  const FloatRows rows = float_rows_of(op, x, size, factor, code.rotation);
  Quantized made = empty_codes(x);
  if (scale.has_value()) {
    GivenCode given = {floats(*scale), stride_of(*scale), nullptr, 0};
    if (zero_point.has_value()) {
      given.zero_point = ints(*zero_point);
      given.zero_step = stride_of(*zero_point);
    }
    quantize_static(rows, code.spec, given, codes_of(made), device.stream());
    return made;
  }
  const SharedCode shared = shared_code_for(x, code.spec);
  const Codes out = codes_of(made, shared);
  if (seed.has_value()) {
    const auto* at = static_cast<const int64_t*>(seed->const_data_ptr());
    quantize_stochastic(rows, code.spec, at, out, device.stream());
  } else {
    quantize(rows, code.spec, out, device.stream());
  }
  return made;
}

Tensor fake_quantize(Tensor x, std::vector<int64_t> axes, int64_t bits, bool symmetric,
                     ScalarType out_dtype) {
  constexpr const char* op = "fake_quantize";
  const OnDevice device(op, x);
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const Dtype dtype = dtype_of(op, out_dtype);
  x = made_rows(op, x, device.stream());
  Tensor y = empty_beside(x, with_last(x, size.columns), out_dtype);
  const SharedCode shared = shared_code_for(x, spec);
  fake_quantize(float_rows_of(op, x, size), spec, shared.code, dtype, y.mutable_data_ptr(),
                device.stream());
  return y;
}

Tensor rotate(Tensor x, std::optional<Tensor> factor, int64_t rotation, bool back) {
  constexpr const char* op = "rotate";
  const OnDevice device(op, x, factor);
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  check_transform(op, x, size, factor, rotation);
  x = made_rows(op, x, device.stream());
  factor = made_contiguous(factor);
  const FloatRows rows = float_rows_of(op, x, size, factor, rotation);
  Tensor y = empty_beside(x, with_last(x, size.columns), x.scalar_type());
  rotate(rows, back, y.mutable_data_ptr(), device.stream());
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"quantize", &quantize>(m);
  implement<"fake_quantize", &fake_quantize>(m);
  implement<"rotate", &rotate>(m);
}

}  // namespace
}  // namespace qfx::cuda
