// lstm and gru on the CPU.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "cpu/core/scratch.h"
#include "cpu/gemm/gate.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"
#include "cpu/rnn/recurrence.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

using Cell = RecurrentLayer::Cell;

// The arguments that both operators have.
struct Arguments {
  const char* op;
  Tensor x, weight;
  std::vector<int64_t> layout;
  std::optional<Tensor> bias;
  Tensor h;
  std::optional<Tensor> c;
  std::vector<int64_t> code;
  bool reverse;
  ScalarType out_dtype;
  std::optional<Tensor> batch_sizes;
};

struct Results {
  Tensor y, h, c;  // c of an LSTM
};

void check_state(const char* op, const char* what, const Tensor& state, int64_t size) {
  check_float(op, what, state);
  STD_TORCH_CHECK(state.dim() == 2 && state.size(1) == size, op, ": ", what, " has shape ",
                  shape_of(state), ", expected two dimensions, the second of ", size,
                  ", the columns of the weight");
}

// How many rows each step has.
std::vector<int64_t> batch_of(const Arguments& of) {
  const char* op = of.op;
  const int64_t most = of.h.size(0);
  if (!of.batch_sizes.has_value()) {
    STD_TORCH_CHECK(of.x.dim() == 3 && of.x.size(1) == most, op, ": x has shape ", shape_of(of.x),
                    " and h ", shape_of(of.h), ", expected steps of a row for each row of h");
    return std::vector<int64_t>(of.x.size(0), most);
  }
  check_dtype(op, "batch_sizes", *of.batch_sizes, {ScalarType::Long});
  STD_TORCH_CHECK(of.x.dim() == 2 && of.batch_sizes->dim() == 1, op, ": x has shape ",
                  shape_of(of.x), " and batch_sizes ", shape_of(*of.batch_sizes),
                  ", expected the rows of all steps and a number for each step");
  const Tensor sizes = made_contiguous(*of.batch_sizes);
  const auto* data = static_cast<const int64_t*>(sizes.const_data_ptr());
  std::vector<int64_t> batch(data, data + sizes.numel());
  const int64_t rows = of.x.size(0);
  int64_t before = most, left = rows;
  for (const int64_t size : batch) {
    STD_TORCH_CHECK(0 <= size && size <= before, op, ": batch_sizes has ", size, " after ", before,
                    ", expected numbers from 0 on, none larger than the one before or than the ",
                    most, " rows of h");
    before = size;
    left -= size;
  }
  STD_TORCH_CHECK(left == 0, op, ": x has ", rows, " rows and batch_sizes ", rows - left);
  return batch;
}

Tensor copy_of(const Tensor& given) {
  const Tensor from = made_contiguous(given);
  Tensor to = empty_on_cpu({from.size(0), from.size(1)}, from.scalar_type());
  const size_t bytes = from.numel() * (from.scalar_type() == ScalarType::Float ? 4 : 2);
  if (bytes != 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), bytes);
  return to;
}

// The state c in float32 while the steps run, and the tensor that it becomes in the end.
class CellState {
 public:
  CellState(const char* op, const Tensor& c, ScalarType out_dtype)
      : dtype_(dtype_of(op, out_dtype)), result_(empty_on_cpu({c.size(0), c.size(1)}, out_dtype)) {
    const Tensor from = made_contiguous(c);
    const Dtype dtype = dtype_of(op, c.scalar_type());
    if (c.numel() == 0) return;
    if (dtype_ != Dtype::kFloat32) {
      values_.resize(c.numel() + kPanel);  // activate_row reads beyond the last
    }
    if (dtype == Dtype::kFloat32) {
      std::memcpy(data(), from.const_data_ptr(), c.numel() * sizeof(float));
    } else {
      kernels_of(current_isa()).row->widen(from.const_data_ptr(), dtype, c.numel(), data());
    }
  }

  float* data() {
    if (!values_.empty()) return values_.data();
    return static_cast<float*>(result_.mutable_data_ptr());
  }

  Tensor finish() {
    char* out = static_cast<char*>(result_.mutable_data_ptr());
    const Kernels& kernels = kernels_of(current_isa());
    if (!values_.empty()) {
      activate_row(kernels, values_.data(), result_.numel(), Activation::kNone, dtype_, out);
    }
    return result_;
  }

 private:
  const Dtype dtype_;
  Tensor result_;
  std::vector<float> values_;
};

Results run(Arguments of, Cell cell) {
  const char* op = of.op;
  const int64_t gates = cell == Cell::kLstm ? 4 : 3;
  check_float(op, "x", of.x);
  check_float(op, "h", of.h);
  STD_TORCH_CHECK(of.h.dim() == 2, op, ": h has shape ", shape_of(of.h),
                  ", expected two dimensions");
  const int64_t size = of.h.size(1), most = of.h.size(0);
  const auto& [spec, group, rotation] = activation_code_of(op, of.code);
  STD_TORCH_CHECK(!spec.per_tensor || group != 0, op,
                  ": code has one scale for all rows, expected one for each");
  const Weight w = weight_of(op, &of.weight, of.h, size, of.layout);
  check_group_of_floats(op, w, group);
  STD_TORCH_CHECK(w.shape().n == gates * size, op, ": the weight has N=", w.shape().n,
                  " and K=", size, ", expected N=", gates * size, ", the ", gates, " gates of K");
  check_cpu_transform(op, of.h, {most, size}, std::nullopt, rotation);
  STD_TORCH_CHECK(of.x.dim() > 0 && of.x.size(of.x.dim() - 1) == gates * size, op, ": x has shape ",
                  shape_of(of.x), ", expected ", gates * size, " columns");
  STD_TORCH_CHECK(of.h.scalar_type() == of.out_dtype, op, ": h is ", dtype_name(of.h.scalar_type()),
                  " and out_dtype ", dtype_name(of.out_dtype), ", expected the same");
  if (of.c.has_value()) {
    check_state(op, "c", *of.c, size);
    STD_TORCH_CHECK(of.c->size(0) == most, op, ": h has ", most, " rows and c ", of.c->size(0));
  }
  const float* bias = bias_of(op, of.bias, gates * size);
  const std::vector<int64_t> batch = batch_of(of);  // as long as x, so after all other checks
  const Tensor x = made_contiguous(of.x);
  std::vector<int64_t> shape(of.x.sizes().begin(), of.x.sizes().end());
  shape.back() = size;
  Results found = {empty_on_cpu(shape, of.out_dtype), copy_of(of.h), {}};
  std::optional<CellState> c;
  if (of.c.has_value()) c.emplace(op, *of.c, of.out_dtype);
  if (found.y.numel() != 0) {
    const FloatMatrix state = {
        nullptr, Dtype::kFloat32, 0, size, size, {nullptr, static_cast<int>(rotation)}};
    recur(kernels_of(current_isa()), {cell, w, bias, {state, spec, group}},
          {x.const_data_ptr(), dtype_of(op, x.scalar_type()), batch, of.reverse,
           static_cast<char*>(found.y.mutable_data_ptr()),
           static_cast<char*>(found.h.mutable_data_ptr()), dtype_of(op, of.out_dtype),
           c ? c->data() : nullptr});
  }
  if (c) found.c = c->finish();
  return found;
}

std::tuple<Tensor, Tensor, Tensor> lstm(Tensor x, Tensor weight, std::vector<int64_t> layout,
                                        std::optional<Tensor> bias, Tensor h, Tensor c,
                                        std::vector<int64_t> code, bool reverse,
                                        ScalarType out_dtype, std::optional<Tensor> batch_sizes) {
  const Results found = run({"lstm", x, weight, std::move(layout), bias, h, c, std::move(code),
                             reverse, out_dtype, batch_sizes},
                            Cell::kLstm);
  return {found.y, found.h, found.c};
}

std::tuple<Tensor, Tensor> gru(Tensor x, Tensor weight, std::vector<int64_t> layout,
                               std::optional<Tensor> bias, Tensor h, std::vector<int64_t> code,
                               bool reverse, ScalarType out_dtype,
                               std::optional<Tensor> batch_sizes) {
  const Results found = run({"gru", x, weight, std::move(layout), bias, h, std::nullopt,
                             std::move(code), reverse, out_dtype, batch_sizes},
                            Cell::kGru);
  return {found.y, found.h};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"lstm", &lstm>(m);
  implement<"gru", &gru>(m);
}

}  // namespace
}  // namespace qfx::cpu
