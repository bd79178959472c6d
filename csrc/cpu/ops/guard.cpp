// linear_guarded on the CPU: linear_dynamic, but rows whose error bound (B5) exceeds the guard are
// those of the float linear.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/guard_counts.h"
#include "cpu/ops/linear.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

using torch::stable::detail::from;

// The sum of (x[k] * factor[k])^2, in double: no float32 overflows or vanishes in it.
double sum_of_squares(const float* x, const float* factor, int64_t n) {
  constexpr int kLanes = 8;  // independent sums, for the compiler to vectorize
  double sums[kLanes] = {};
  const auto add = [&](int64_t k, int lane) {
    const double v = factor == nullptr ? x[k] : static_cast<double>(x[k]) * factor[k];
    sums[lane] += v * v;
  };
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(k + lane, lane);
  }
  for (; k < n; ++k) add(k, 0);
  double sum = 0;
  for (double lane : sums) sum += lane;
  return sum;
}

// What the bound of a row is computed with.
struct Bound {
  double step;         // of x's elements in units of the row's scale (B1), times sqrt K
  double alpha, beta;  // of the weight
  const float* factor;
};

// g_m of a row with this scale. (B5)
double bound_of(const Bound& bound, const float* x, int64_t k, double scale) {
  const double size = std::sqrt(sum_of_squares(x, nullptr, k));
  if (size == 0) return 0;
  const double transformed =
      bound.factor == nullptr ? size : std::sqrt(sum_of_squares(x, bound.factor, k));
  return (bound.step * scale * bound.alpha + transformed * bound.beta) / size;
}

Bound bound_for(const CodeSpec& spec, const Tensor& error, const float* factor, int64_t k) {
  const double n = (1 << spec.bits) - (spec.symmetric ? 2 : 1);  // qmax - qmin
  const double step = (0.5 + std::ldexp(n, -21)) * std::sqrt(static_cast<double>(k));
  return {step, floats(error)[0], floats(error)[1], factor};
}

// The rows that are to run in float. What cannot be compared, as a row with a NaN, is among them.
std::vector<int64_t> rows_above(double guard, const Bound& bound, const FloatMatrix& x,
                                const double* sizes) {
  const Kernels& kernels = kernels_of(current_isa());
  thread_local Scratch scratch;
  bool* above = scratch.get<bool>(std::max<int64_t>(x.rows, 1));
  parallel(x.rows, x.rows * x.columns, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float* row = row_as_floats(kernels, x, m);
      above[m] = !(bound_of(bound, row, x.columns, sizes[m]) <= guard);
    }
  });
  std::vector<int64_t> rows;
  for (int64_t m = 0; m < x.rows; ++m) {
    if (above[m]) rows.push_back(m);
  }
  return rows;
}

// aten::<name>, its overload after a dot, of these arguments, one tensor out.
template <typename... Arguments>
Tensor aten(const std::string& name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack = {from(arguments)...};
  const size_t dot = std::min(name.find('.'), name.size());
  const std::string known = "aten::" + name.substr(0, dot);
  const char* overload = dot == name.size() ? "" : name.c_str() + dot + 1;
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(known.c_str(), overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// As the float model computes it, of a tensor in its dtype.
Tensor activated(Activation activation, const Tensor& y) {
  switch (activation) {
#define QFX_ACTIVATION(value, name, in_float) \
  case Activation::value:                     \
    return in_float;
#include "activations.inc"
#undef QFX_ACTIVATION
  }
  return y;  // activation_of gives no other
}

// The linear on these rows of x, in the dtype that it had before the pass.
Tensor in_float(const char* op, const Tensor& x, const Tensor& w, const DynamicLinear& how) {
  const auto cast = [&](const Tensor& t) { return torch::stable::to(t, how.out_dtype); };
  const std::optional<Tensor> bias =
      how.bias.has_value() ? std::optional<Tensor>(cast(*how.bias)) : std::nullopt;
  return activated(activation_of(op, how.activation), aten("linear", cast(x), cast(w), bias));
}

// Replaces these rows of y, an operator's fresh output, by those of the float linear.
void run_in_float(const char* op, const std::vector<int64_t>& rows, const Tensor& x,
                  const Tensor& w, const DynamicLinear& how, const Matrix& size, Tensor* y) {
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t in_bytes = size.columns * (x.scalar_type() == ScalarType::Float ? 4 : 2);
  const int64_t out_bytes = w.size(0) * (how.out_dtype == ScalarType::Float ? 4 : 2);
  Tensor some = empty_on_cpu({count, size.columns}, x.scalar_type());
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* gathered = static_cast<char*>(some.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(gathered + i * in_bytes, source + rows[i] * in_bytes, in_bytes);
  const Tensor result = allocated({count, w.size(0)}, how.out_dtype,
                                  [&] { return made_contiguous(in_float(op, some, w, how)); });
  const char* found = static_cast<const char*>(result.const_data_ptr());
  char* out = static_cast<char*>(y->mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(out + rows[i] * out_bytes, found + i * out_bytes, out_bytes);
}

// The further arguments of a guarded linear.
struct Guarding {
  Tensor w, error;
  double guard;
  Text site;
};

void check_guard(const char* op, const Guarding& g, const Tensor& x, int64_t n) {
  const Matrix size = matrix_of(op, "x", x);
  check_float(op, "w", g.w);
  check_dtype(op, "error", g.error, {ScalarType::Float});
  STD_TORCH_CHECK(g.w.dim() == 2 && g.w.size(0) == n && g.w.size(1) == size.columns, op,
                  ": w has shape ", shape_of(g.w), ", expected ", n, "x", size.columns,
                  ", the packed weight's N and K");
  STD_TORCH_CHECK(g.error.dim() == 1 && g.error.numel() == 2, op, ": error has shape ",
                  shape_of(g.error), ", expected 2, the weight's alpha and beta");
  STD_TORCH_CHECK(g.guard > 0 && std::isfinite(g.guard), op, ": guard=", g.guard,
                  " is no positive relative error");
}

// y, the int8 linear of a contiguous x, whose rows' scales have these sizes, but for the rows that
// run in float.
Tensor guarded(const char* op, const Guarding& g, const Tensor& x, const DynamicLinear& how,
               const double* sizes, Tensor y) {
  const Matrix size = matrix_of(op, "x", x);
  if (y.numel() == 0) {  // of rows without number, perhaps
    count_guarded(g.site, size.rows, 0);
    return y;
  }
  const Tensor error = made_contiguous(g.error);
  const std::optional<Tensor> factor = made_contiguous(how.factor);
  const float* factors = factor ? floats(*factor) : nullptr;
  const Bound bound = bound_for(how.code.spec, error, factors, size.columns);
  const FloatMatrix matrix = float_matrix_of(op, x, size, std::nullopt, 0);
  const std::vector<int64_t> rows = rows_above(g.guard, bound, matrix, sizes);
  if (!rows.empty()) run_in_float(op, rows, x, g.w, how, size, &y);
  count_guarded(g.site, size.rows, static_cast<int64_t>(rows.size()));
  return y;
}

Tensor linear_guarded(Tensor x, Tensor w, Tensor weight, std::vector<int64_t> layout, Tensor error,
                      std::optional<Tensor> bias, double guard, Text site,
                      std::vector<int64_t> code, Text activation, ScalarType out_dtype,
                      std::optional<Tensor> factor) {
  constexpr const char* op = "linear_guarded";
  check_float(op, "x", x);
  const WeightLayoutArgument known = layout_argument_of(op, layout);
  STD_TORCH_CHECK(known.bits == 8, op, ": weights of ", known.bits,
                  " bits have no bound, expected 8 bits");
  const Guarding g = {w, error, guard, site};
  check_guard(op, g, x, known.n);
  const DynamicLinear how = {weight,     layout,    bias,  activation_code_of(op, code),
                             activation, out_dtype, factor};
  const LinearOfFloats made = linear_of_floats(op, x, how, true);
  return guarded(op, g, made.x, how, made.sizes, made.y);
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"linear_guarded", &linear_guarded>(m); }

}  // namespace
}  // namespace qfx::cpu
