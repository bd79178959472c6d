// pack_lowbit, unpack_lowbit, lowbit_linear, lowbit_linear_dynamic, lowbit_linear_ste and
// lowbit_weight_linear on the CPU: weights of 4 and 5 bits in groups of K.
#include <algorithm>
#include <utility>

#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/lowbit_product.h"
#include "cpu/gemm/whole.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/ops/arguments.h"
#include "cpu/ops/row_values.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

const int8_t* bytes_of(const Tensor& t) { return static_cast<const int8_t*>(t.const_data_ptr()); }

// Makes `packed` contiguous and opens it for activations with k columns and n outputs.
LowbitWeight lowbit_of(const char* op, Tensor* packed, const Tensor& x, int64_t k, int64_t n) {
  LowbitWeight w;
  open_whole(op, "pack_lowbit", packed, [&](const int8_t* data, int64_t bytes, uint64_t* contents) {
    const std::string fault = open_lowbit(data, bytes, &w);
    *contents = w.shape.contents;
    return fault;
  });
  STD_TORCH_CHECK(w.shape.k == k, op, ": x has K=", k, " (shape ", shape_of(x),
                  ") but the weight was packed for K=", w.shape.k);
  STD_TORCH_CHECK(w.shape.n == n, op, ": n=", n,
                  " is asked for but the weight was packed for N=", w.shape.n);
  return w;
}

void check_kind(const char* op, const LowbitWeight& w, int64_t bits, int64_t group) {
  STD_TORCH_CHECK(w.kind.bits == bits && w.kind.group == group, op, ": w_bits=", bits,
                  " w_group=", group, ", but the weight was packed with ", w.kind.bits,
                  " bits in groups of ", w.kind.group);
}

// --- packing ---

void check_codes(const char* op, const Tensor& codes, int64_t bits, int64_t group) {
  check_dtype(op, "codes", codes, {ScalarType::Char});
  STD_TORCH_CHECK(codes.dim() == 2, op, ": codes have shape ", shape_of(codes),
                  ", expected [N, K]");
  STD_TORCH_CHECK(bits == 4 || bits == 5, op, ": bits=", bits, ", expected 4 or 5");
  STD_TORCH_CHECK(is_lowbit_group(group), op, ": group=", group, ", expected 32, 64 or 128");
  STD_TORCH_CHECK(codes.size(1) <= kMaxK, op, ": K=", codes.size(1), " is above ", kMaxK);
}

void check_of_groups(const char* op, const char* what, const Tensor& t, const Tensor& codes,
                     int64_t group) {
  const int64_t n = codes.size(0), groups = (codes.size(1) + group - 1) / group;
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == n && t.size(1) == groups, op, ": ", what,
                  " has shape ", shape_of(t), ", expected ", n, "x", groups,
                  ": one for each group of ", group, " of K=", codes.size(1));
}

template <typename T>
void check_range(const char* op, const char* what, const Tensor& t, int64_t bits) {
  const int limit = 1 << (bits - 1);
  const T* values = static_cast<const T*>(t.const_data_ptr());
  const auto outside = [&](T v) { return v < -limit || v >= limit; };
  const T* const end = values + t.numel();
  const T* const found = std::find_if(values, end, outside);
  STD_TORCH_CHECK(found == end, op, ": ", what, " have ", found == end ? 0 : +*found,
                  ", which is no code of ", bits, " bits: they lie in [", -limit, ", ", limit - 1,
                  "]");
}

// What holds scales and minimums.
Dtype half_type(const char* op, const Tensor& scale, const std::optional<Tensor>& minimum) {
  const Kernels& kernels = kernels_of(current_isa());
  const auto of = [&](const char* what, const Tensor& t) {
    const std::optional<Dtype> found = half_type_of(kernels, floats(t), t.numel());
    STD_TORCH_CHECK(found.has_value(), op, ": ", what,
                    " has values that are neither all bfloat16 nor all float16: round them first");
    return *found;
  };
  const Dtype first = of("scale", scale);
  if (!minimum.has_value() || of("minimum", *minimum) == first) return first;
  const Tensor& wide = first == Dtype::kBFloat16 ? scale : *minimum;  // the other is float16
  STD_TORCH_CHECK(
      fits_float16(kernels, floats(wide), wide.numel()), op,
      ": scale and minimum are not of one type: neither bfloat16 nor float16 holds both");
  return Dtype::kFloat16;
}

Tensor pack_lowbit(Tensor codes, Tensor scale, std::optional<Tensor> zero_point,
                   std::optional<Tensor> minimum, int64_t bits, int64_t group) {
  constexpr const char* op = "pack_lowbit";
  check_codes(op, codes, bits, group);
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_of_groups(op, "scale", scale, codes, group);
  STD_TORCH_CHECK(!zero_point.has_value() || !minimum.has_value(), op,
                  ": both zero_point and minimum are given, expected one of them");
  if (zero_point.has_value()) {
    check_dtype(op, "zero_point", *zero_point, {ScalarType::Int});
    check_of_groups(op, "zero_point", *zero_point, codes, group);
  } else if (minimum.has_value()) {
    check_dtype(op, "minimum", *minimum, {ScalarType::Float});
    check_of_groups(op, "minimum", *minimum, codes, group);
  }
  codes = made_contiguous(codes);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  minimum = made_contiguous(minimum);
  check_range<int8_t>(op, "codes", codes, bits);
  LowbitParts from = {bytes_of(codes), floats(scale), nullptr,
                      nullptr,         codes.size(0), codes.size(1)};
  Shift shift = Shift::kNone;
  if (zero_point.has_value()) {
    check_range<int32_t>(op, "zero points", *zero_point, bits);
    from.zero = ints(*zero_point);
    shift = Shift::kZeroPoints;
  } else if (minimum.has_value()) {
    from.minimum = floats(*minimum);
    shift = Shift::kMinimums;
  }
  const LowbitKind kind = {bits, group, shift, half_type(op, scale, minimum)};
  const int64_t size = lowbit_size(from.n, from.k, kind);
  Tensor packed = empty_packed(size);
  int8_t* out = static_cast<int8_t*>(packed.mutable_data_ptr());
  know_whole(out, pack_lowbit(kernels_of(current_isa()), from, kind, out));
  return packed;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack_lowbit(Tensor packed, int64_t n, int64_t k,
                                                         int64_t group) {
  constexpr const char* op = "unpack_lowbit";
  const LowbitWeight w = lowbit_of(op, &packed, packed, k, n);
  check_kind(op, w, w.kind.bits, group);
  const std::string fault = fault_of_contents(bytes_of(packed), packed.numel(), w.shape.contents);
  STD_TORCH_CHECK(fault.empty(), op, ": not a packed weight of this build: ", fault);
  const std::vector<int64_t> each = {n, w.shape.groups()};
  Tensor codes = empty_on_cpu({n, k}, ScalarType::Char);
  Tensor scale = empty_on_cpu(each, ScalarType::Float);
  Tensor zero = empty_on_cpu(each, ScalarType::Int);
  Tensor minimum = empty_on_cpu(each, ScalarType::Float);
  unpack_lowbit(kernels_of(current_isa()), w,
                {static_cast<int8_t*>(codes.mutable_data_ptr()),
                 static_cast<float*>(scale.mutable_data_ptr()),
                 static_cast<int32_t*>(zero.mutable_data_ptr()),
                 static_cast<float*>(minimum.mutable_data_ptr())});
  return {codes, scale, zero, minimum};
}

// --- products ---

Tensor lowbit_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, int64_t n,
                     int64_t w_bits, int64_t w_group, std::optional<Tensor> bias, Text activation,
                     ScalarType out_dtype) {
  constexpr const char* op = "lowbit_linear";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  const Matrix size = matrix_of(op, "q", q);
  const LowbitWeight w = lowbit_of(op, &packed, q, size.columns, n);
  check_kind(op, w, w_bits, w_group);
  const int64_t groups = w.shape.groups();
  check_row_values(op, "scale", scale, size.rows, groups);
  check_row_values(op, "zero_point", zero_point, size.rows, groups);
  FloatOutput to = {nullptr, bias_of(op, bias, n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  const auto scales = row_values_of<float>(scale, size.rows, groups);
  const auto zeros = row_values_of<int32_t>(zero_point, size.rows, groups);
  Tensor y = empty_on_cpu(with_last(q, n), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const Kernels& kernels = kernels_of(current_isa());
  in_chunks(kernels, w.shape, size.rows, [&](int64_t first, int64_t count) {
    const auto zeros_here = zeros.from(first);
    const bool some = any(zeros_here, count, groups);
    const Format& format = lowbit_format_for(kernels, w, some, count);
    const GroupedCodes rows(format, w.shape, bytes_of(q) + first * w.shape.k, scales.from(first),
                            zeros_here, count, needs_sums(kernels, w, format));
    const LowbitLinear all[] = {{w, to}};
    lowbit_linears(kernels, rows, all, first);
  });
  return y;
}

Tensor lowbit_linear_dynamic(Tensor x, Tensor packed, int64_t n, int64_t w_bits, int64_t w_group,
                             std::optional<Tensor> bias, std::vector<int64_t> axes, int64_t group,
                             int64_t bits, bool symmetric, Text activation, ScalarType out_dtype,
                             std::optional<Tensor> factor, int64_t rotation) {
  constexpr const char* op = "lowbit_linear_dynamic";
  check_float(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const Matrix size = matrix_of(op, "x", x);
  const LowbitWeight w = lowbit_of(op, &packed, x, size.columns, n);
  check_kind(op, w, w_bits, w_group);
  check_group_of_x(op, group, w.shape);
  check_cpu_transform(op, x, size, factor, rotation);
  FloatOutput to = {nullptr, bias_of(op, bias, n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  Tensor y = empty_on_cpu(with_last(x, n), out_dtype);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, rotation);
  if (y.numel() == 0) return y;
  to.data = static_cast<char*>(y.mutable_data_ptr());
  to.bytes = y.numel() * to.element();
  const LowbitLinear all[] = {{w, to}};
  lowbit_linears_of_rows(kernels_of(current_isa()), matrix, spec, group, all);
  return y;
}

// The forward of a linear with gradients: x, its step and the transform are for these only
// (qfx/ops/lowbit_ste.py).
Tensor lowbit_linear_ste(Tensor /*x*/, std::optional<Tensor> bias, std::optional<Tensor> /*x_step*/,
                         Tensor q, Tensor scale, Tensor zero_point, Tensor packed, int64_t n,
                         int64_t w_bits, int64_t w_group, int64_t /*bits*/, bool /*symmetric*/,
                         ScalarType out_dtype, std::optional<Tensor> /*factor*/,
                         int64_t /*rotation*/) {
  return lowbit_linear(q, scale, zero_point, packed, n, w_bits, w_group, bias, "none", out_dtype);
}

Tensor lowbit_weight_linear(Tensor x, Tensor packed, int64_t n, int64_t w_bits, int64_t w_group,
                            std::optional<Tensor> bias, Text activation, ScalarType out_dtype) {
  constexpr const char* op = "lowbit_weight_linear";
  constexpr int64_t kRowsAtOnce = 64;  // whose sums of a panel stay in the first cache
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const LowbitWeight w = lowbit_of(op, &packed, x, size.columns, n);
  check_kind(op, w, w_bits, w_group);
  FloatOutput to = {nullptr, bias_of(op, bias, n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  x = made_contiguous(x);
  Tensor y = empty_on_cpu(with_last(x, n), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  const FloatMatrix all = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, w.shape.k};
  const int64_t stride = round_up(w.shape.k, kGroup);
  for (int64_t first = 0; first < size.rows; first += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, size.rows - first);
    to.data = out + first * n * to.element();
    const FloatMatrix part = all.part(first, rows);
    lowbit_weight_linear(kernels, {padded_floats(kernels, part, stride), rows, stride}, w, to);
  }
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"pack_lowbit", &pack_lowbit>(m);
  implement<"unpack_lowbit", &unpack_lowbit>(m);
  implement<"lowbit_linear", &lowbit_linear>(m);
  implement<"lowbit_linear_dynamic", &lowbit_linear_dynamic>(m);
  implement<"lowbit_linear_ste", &lowbit_linear_ste>(m);
  implement<"lowbit_weight_linear", &lowbit_weight_linear>(m);
}

}  // namespace
}  // namespace qfx::cpu
