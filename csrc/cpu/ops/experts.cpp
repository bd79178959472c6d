// linear_experts and experts on the CPU.
#include "cpu/gemm/experts.h"

#include <cstring>
#include <deque>
#include <limits>
#include <span>
#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"
#include "cpu/ops/weight_stack.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

void check_matrix(const char* op, const Tensor& x) {
  check_float(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 2, op, ": x has shape ", shape_of(x), ", expected two dimensions");
}

// --- rows sorted by expert ---

void check_offsets(const char* op, const Tensor& offsets, int64_t experts) {
  check_dtype(op, "offsets", offsets, {ScalarType::Int});
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) == experts, op, ": offsets has shape ",
                  shape_of(offsets), ", expected ", experts, ", where the rows of each expert end");
}

// The ends of the rows of each expert.
std::vector<int64_t> ends_of(const char* op, const Tensor& offsets, int64_t experts, int64_t rows) {
  const Tensor values = made_contiguous(offsets);
  std::vector<int64_t> ends(ints(values), ints(values) + experts);
  int64_t before = 0;
  for (int64_t e = 0; e < experts; ++e) {
    STD_TORCH_CHECK(before <= ends[e] && ends[e] <= rows, op, ": the rows of expert ", e,
                    " end at ", ends[e], ", expected between ", before, ", where they begin, and ",
                    rows, ", the rows of x");
    before = ends[e];
  }
  return ends;
}

Tensor linear_experts(Tensor x, Tensor weight, std::vector<int64_t> layout, Tensor offsets,
                      std::optional<Tensor> bias, std::vector<int64_t> code, Text activation,
                      ScalarType out_dtype, std::optional<Tensor> factor) {
  constexpr const char* op = "linear_experts";
  check_matrix(op, x);
  const Matrix size = matrix_of(op, "x", x);
  const auto& [spec, group, rotation] = activation_code_of(op, code);
  WeightStack stack(op, "weight", weight, bias, size.columns, layout);
  check_cpu_transform(op, x, size, factor, rotation);
  check_offsets(op, offsets, stack.count());
  const Dtype dtype = dtype_of(op, out_dtype);
  const Activation act = activation_of(op, activation);
  stack.check(group);
  const std::vector<int64_t> ends = ends_of(op, offsets, stack.count(), size.rows);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  Tensor y = empty_on_cpu({size.rows, stack.n()}, out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  char* out = static_cast<char*>(y.mutable_data_ptr());
  std::deque<Weight> opened;
  std::vector<ExpertRows> experts;
  int64_t begin = 0;
  for (int64_t e = 0; e < stack.count(); begin = ends[e++]) {
    if (begin == ends[e]) continue;
    const Weight& w = opened.emplace_back(stack.open(e, group));
    experts.push_back({begin, ends[e], {w, {stack.bias(e), act, dtype, out}}});
  }
  linear_of_experts(kernels_of(current_isa()),
                    {float_matrix_of(op, x, size, factor, rotation), spec, group}, experts);
  const int64_t row = stack.n() * size_of(dtype);
  std::memset(out + begin * row, 0, (size.rows - begin) * row);
  return y;
}

// --- whole blocks ---

Gate::Order order_of(const char* op, const std::string& name) {
  if (name == "none") return Gate::Order::kNone;
  if (name == "halves") return Gate::Order::kHalves;
  STD_TORCH_CHECK(name == "interleaved", op, ": gate is '", name,
                  "', expected none, halves or interleaved");
  return Gate::Order::kInterleaved;
}

UsedExperts used_by(const char* op, const Tensor& expert, int64_t count) {
  const std::span id(static_cast<const int64_t*>(expert.const_data_ptr()),
                     static_cast<size_t>(expert.numel()));
  for (const int64_t e : id) {
    STD_TORCH_CHECK(e >= 0, op, ": expert has ", e, ", expected numbers from 0 on");
  }
  return used_experts(id, count);
}

// As float32: its own memory, or this.
const float* as_floats(const char* op, const Tensor& t, std::vector<float>& memory) {
  const Dtype dtype = dtype_of(op, t.scalar_type());
  if (dtype == Dtype::kFloat32) return floats(t);
  memory.resize(t.numel());
  kernels_of(current_isa()).row->widen(t.const_data_ptr(), dtype, t.numel(), memory.data());
  return memory.data();
}

void check_routing(const char* op, const Tensor& expert, const Tensor& routing, int64_t tokens) {
  check_dtype(op, "expert", expert, {ScalarType::Long});
  check_float(op, "routing", routing);
  const bool fits = expert.dim() == 2 && expert.size(0) == tokens && routing.dim() == 2 &&
                    routing.size(0) == tokens && routing.size(1) == expert.size(1);
  STD_TORCH_CHECK(fits, op, ": expert has shape ", shape_of(expert), " and routing ",
                  shape_of(routing), ", expected a row for each of the ", tokens,
                  " tokens, and in it an expert and its weight for each slot");
}

void check_between(const char* op, const ActivationCode& code) {
  STD_TORCH_CHECK(!code.spec.per_tensor || code.group != 0, op,
                  ": down_code has one scale for all rows, expected one for each");
  STD_TORCH_CHECK(is_rotation(code.rotation), op, ": down_code has rotation=", code.rotation,
                  ", expected 0, 16 or 64");
}

Tensor experts_of_tokens(Tensor x, Tensor expert, Tensor routing, Tensor up,
                         std::vector<int64_t> up_layout, std::optional<Tensor> up_bias, Tensor down,
                         std::vector<int64_t> down_layout, std::optional<Tensor> down_bias,
                         std::vector<int64_t> code, std::vector<int64_t> down_code, Text activation,
                         Text gate, ScalarType out_dtype, double limit, double shift) {
  constexpr const char* op = "experts";
  check_matrix(op, x);
  const Matrix size = matrix_of(op, "x", x);
  check_routing(op, expert, routing, size.rows);
  const ActivationCode first = activation_code_of(op, code);
  const ActivationCode second = activation_code_of(op, down_code);
  check_cpu_transform(op, x, size, std::nullopt, first.rotation);
  WeightStack ups(op, "up", up, up_bias, size.columns, up_layout);
  const Gate::Order order = order_of(op, gate);
  const int64_t between = order == Gate::Order::kNone ? ups.n() : ups.n() / 2;
  STD_TORCH_CHECK(order == Gate::Order::kNone || ups.n() % 2 == 0, op, ": up has N=", ups.n(),
                  ", expected an even number for a gate");
  WeightStack downs(op, "down", down, down_bias, between, down_layout);
  STD_TORCH_CHECK(ups.count() == downs.count(), op, ": up has ", ups.count(), " experts and down ",
                  downs.count());
  check_between(op, second);
  STD_TORCH_CHECK(limit >= 0, op, ": limit=", limit, ", expected a positive number, or 0 for none");
  const Activation act = activation_of(op, activation);
  const Dtype dtype = dtype_of(op, out_dtype);
  ups.check(first.group);
  downs.check(second.group);
  expert = made_contiguous(expert);
  routing = made_contiguous(routing);
  if (size.rows == 0 || downs.n() == 0) return empty_on_cpu({size.rows, downs.n()}, out_dtype);
  const UsedExperts used = used_by(op, expert, ups.count());
  x = made_contiguous(x);
  Tensor y = empty_on_cpu({size.rows, downs.n()}, out_dtype);
  std::vector<ExpertWeights> weights;
  for (const int64_t e : used.number) {
    weights.push_back(
        {ups.open(e, first.group), downs.open(e, second.group), ups.bias(e), downs.bias(e)});
  }
  std::vector<float> memory;
  const float unlimited = std::numeric_limits<float>::infinity();
  const RoutedTokens tokens = {
      {float_matrix_of(op, x, size, std::nullopt, first.rotation), first.spec, first.group},
      expert.size(1),
      used.place.data(),
      as_floats(op, routing, memory),
      {act, order, limit == 0 ? unlimited : static_cast<float>(limit), static_cast<float>(shift)},
      second.spec,
      second.group,
      {nullptr, static_cast<int>(second.rotation)},
      downs.n()};
  experts(kernels_of(current_isa()), tokens, weights, dtype,
          static_cast<char*>(y.mutable_data_ptr()));
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"linear_experts", &linear_experts>(m);
  implement<"experts", &experts_of_tokens>(m);
}

}  // namespace
}  // namespace qfx::cpu
