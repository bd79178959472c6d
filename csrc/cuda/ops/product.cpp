#include "cuda/ops/product.h"

#include <cstdlib>
#include <numeric>

#include "cuda/gemm/copy_rows.h"
#include "cuda/sm90/choice.h"
#include "cuda/sm90/multiply.h"

namespace qfx::cuda {
namespace {

bool is_aligned(const void* data, int64_t pitch) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(pitch)) % kPitch == 0;
}

const int8_t* codes_of(const Tensor& t) { return static_cast<const int8_t*>(t.const_data_ptr()); }

// From a matrix of t to the next, where those of all batch axes follow each other evenly.
std::optional<int64_t> batch_step_of(const Tensor& t) {
  std::optional<int64_t> step;
  int64_t expected = 0;
  for (int64_t d = t.dim() - 3; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (step.has_value() && t.stride(d) != expected) return std::nullopt;
    if (!step.has_value()) step = t.stride(d);
    expected = t.stride(d) * t.size(d);
  }
  return step.value_or(0);
}

OwnedRows empty_rows(const Tensor& like, const RowSizes& size) {
  Tensor memory = empty_beside(like, {size.batch, size.rows, size.pitch}, ScalarType::Char);
  return {memory, {codes_of(memory), size.pitch, size.rows * size.pitch}};
}

OwnedRows padded(const Tensor& like, const CodeLines& lines, const RowSizes& size, Stream stream) {
  OwnedRows made = empty_rows(like, size);
  pad_codes(lines, size, data_of<int8_t>(made.memory), stream);
  return made;
}

// The value of QFX_CUDA_KERNEL, which forces a kernel (choice.h): for benchmarks and tests.
std::string forced_kernel() {
  const char* value = std::getenv("QFX_CUDA_KERNEL");
  return value == nullptr ? "" : value;
}

template <typename Terms>
using Multiply = void (*)(const Sizes&, const Rows&, const Rows&, const Terms&, const Output&,
                          const GemmPlan&, int32_t*, Stream);
template <typename Terms>
using MultiplySm90 = void (*)(const Sizes&, const Rows&, const Rows&, const Terms&, const Output&,
                              const Choice&, int32_t*, int, Stream);

template <typename Terms>
void run(const OnDevice& device, const Tensor& like, sm90::Operands operands, const Sizes& size,
         const Rows& a, const Rows& w, const Terms& terms, const Output& out,
         Multiply<Terms> portable, MultiplySm90<Terms> hopper) {
  if (size.batch * size.m * size.n == 0) return;
  const Gpu& gpu = device.gpu();
  const Choice choice = choose_or_force(operands, size, gpu, forced_kernel());
  const bool is_portable = choice.kernel == "portable" || !sm90::can_read(size, a, w);
  const GemmPlan plan = plan_of(size, gpu.multiprocessors);
  const int64_t count = is_portable ? part_values(size, plan) : sm90::part_values(size, choice);
  std::optional<Tensor> memory;
  if (count > 0) memory = empty_beside(like, {count}, ScalarType::Int);
  int32_t* parts = memory.has_value() ? data_of<int32_t>(*memory) : nullptr;
  if (is_portable) return portable(size, a, w, terms, out, plan, parts, device.stream());
  if (count > 0) device.clear(parts, static_cast<size_t>(count) * sizeof(int32_t));
  hopper(size, a, w, terms, out, choice, parts, gpu.multiprocessors, device.stream());
}

}  // namespace

OwnedRows rows_of_codes(const Tensor& given, const Matrix& size, Stream stream) {
  const Tensor q = made_contiguous(given);
  const int64_t k = size.columns;
  if (is_aligned(q.const_data_ptr(), k)) return {q, {codes_of(q), k, size.rows * k}};
  return padded(q, {codes_of(q), 0, k}, {1, size.rows, k, round_up(k, kPitch)}, stream);
}

OwnedRows rows_of_matrices(const Tensor& given, Stream stream) {
  const int64_t last = given.dim() - 1;
  const auto lies_well = [&](const Tensor& t) {
    const bool lines = t.stride(last) == 1 || t.stride(last - 1) == 1 || t.size(last) == 1;
    return lines && batch_step_of(t).has_value();
  };
  const Tensor t = lies_well(given) ? given : made_contiguous(given);
  const int64_t rows = t.size(last - 1), k = t.size(last), batch_step = *batch_step_of(t);
  const auto end = t.sizes().end() - 2;
  const int64_t batch = std::accumulate(t.sizes().begin(), end, int64_t{1}, std::multiplies<>());
  const RowSizes size = {batch, rows, k, round_up(k, kPitch)};
  if (t.stride(last) != 1 && k != 1) {
    OwnedRows made = empty_rows(t, size);
    turn_codes({codes_of(t), batch_step, t.stride(last)}, size, data_of<int8_t>(made.memory),
               stream);
    return made;
  }
  const int64_t step = t.stride(last - 1);
  if (is_aligned(t.const_data_ptr(), step | batch_step) && k % kPitch == 0) {
    return {t, {codes_of(t), step, batch_step}};
  }
  return padded(t, {codes_of(t), batch_step, step}, size, stream);
}

Rows rows_of_weight(const PackedWeight& w) { return {w.w, w.layout.pitch(), 0}; }

void check_zero_points(const char* op, const char* what, const Tensor& zero_point, int64_t rows) {
  check_dtype(op, what, zero_point, {ScalarType::Int});
  check_per_row(op, what, zero_point, rows);
}

void check_row_scales(const char* op, const char* what, const Tensor& scale, int64_t rows) {
  check_dtype(op, what, scale, {ScalarType::Float});
  check_per_row(op, what, scale, rows);
}

void check_col_scales(const char* op, const char* what, const Tensor& scale, int64_t n) {
  check_dtype(op, what, scale, {ScalarType::Float});
  check_vector(op, what, scale, n);
}

void check_bias(const char* op, const std::optional<Tensor>& bias, int64_t n) {
  if (!bias.has_value()) return;
  check_float(op, "bias", *bias);
  check_vector(op, "bias", *bias, n);
}

AnyFloats bias_of(const char* op, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return {nullptr, Dtype::kFloat32};
  return {bias->const_data_ptr(), dtype_of(op, bias->scalar_type())};
}

QuantizedRows quantized_rows(const char* op, const Tensor& given, const CodeSpec& spec,
                             Stream stream, const std::optional<Tensor>& given_factor,
                             int64_t rotation) {
  const Matrix size = matrix_of(op, "x", given);
  check_transform(op, given, size, given_factor, rotation);
  const Tensor x = made_contiguous(given);
  const std::optional<Tensor> factor = made_contiguous(given_factor);
  const FloatRows rows = float_rows_of(op, x, size, factor, rotation);
  const std::vector<int64_t> shape = with_last(x, 1);
  QuantizedRows made = {empty_beside(x, with_last(x, size.columns), ScalarType::Char),
                        empty_beside(x, shape, ScalarType::Float),
                        empty_beside(x, shape, ScalarType::Int)};
  const SharedCode shared = shared_code_for(x, spec);
  const Codes codes = {data_of<int8_t>(made.q), data_of<float>(made.scale),
                       data_of<int32_t>(made.zero_point), shared.code};
  quantize(rows, spec, codes, stream);
  return made;
}

void run_product(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                 const Rows& w, const CodeTerms& terms, const Output& out) {
  run<CodeTerms>(device, like, sm90::Operands::kCodes, size, a, w, terms, out, multiply_codes,
                 sm90::multiply_codes);
}

void run_product(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                 const Rows& w, const SignTerms& terms, const Output& out) {
  run<SignTerms>(device, like, sm90::Operands::kBits, size, a, w, terms, out, multiply_signs,
                 sm90::multiply_signs);
}

}  // namespace qfx::cuda
