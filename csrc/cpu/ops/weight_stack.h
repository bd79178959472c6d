// Several packed weights of the same shape in one tensor, and their biases.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/ops/row_values.h"

namespace qfx::cpu {

// Packed weights, [E, bytes], of experts or groups of channels, and their biases [E, N]. Rows are
// read where they lie, or copied when they are asked for, after everything was checked.
class WeightStack {
 public:
  // `what`: the name of the argument.
  WeightStack(const char* op, const char* what, const Tensor& weight,
              const std::optional<Tensor>& bias, int64_t k, const std::vector<int64_t>& layout)
      : op_(op), k_(k), layout_(layout_argument_of(op, layout)), weight_(weight), bias_(bias) {
    check_dtype(op, what, weight_, {ScalarType::Char});
    STD_TORCH_CHECK(weight_.dim() == 2, op, ": ", what, " has shape ", shape_of(weight_),
                    ", expected a packed weight in each of its rows");
    if (!bias_.has_value()) return;
    check_float(op, "a bias", *bias_);
    STD_TORCH_CHECK(bias_->dim() == 2 && bias_->size(0) == count() && bias_->size(1) == layout_.n,
                    op, ": a bias has shape ", shape_of(*bias_), ", expected ", count(), "x",
                    layout_.n, ", a row for each expert");
  }

  int64_t count() const { return weight_.size(0); }
  int64_t n() const { return layout_.n; }

  // Lives as long as this, as the bias does.
  Weight open(int64_t e, int64_t group) {
    const int64_t bytes = weight_.size(1);
    const auto* data = static_cast<const int8_t*>(weight_.const_data_ptr()) + e * weight_.stride(0);
    if (weight_.stride(1) != 1) data = copied(data);
    const Weight w = weight_at(op_, data, bytes, k_, layout_);
    check_group_of_floats(op_, w, group);
    return w;
  }

  // Whether it fits x, seen at the first expert before anything is copied.
  void check(int64_t group) {
    if (count() > 0) open(0, group);
  }

  // Null without a bias.
  const float* bias(int64_t e) {
    if (!bias_.has_value()) return nullptr;
    const Dtype dtype = dtype_of(op_, bias_->scalar_type());
    if (bias_->stride(1) != 1) bias_ = made_contiguous(bias_);
    const void* data =
        static_cast<const char*>(bias_->const_data_ptr()) + e * bias_->stride(0) * size_of(dtype);
    if (dtype == Dtype::kFloat32) return static_cast<const float*>(data);
    std::vector<float>& copy = copies_.emplace_back(n());
    kernels_of(current_isa()).row->widen(data, dtype, n(), copy.data());
    return copy.data();
  }

 private:
  // Once its header says that it is a packed weight.
  const int8_t* copied(const int8_t* data) {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor row = torch::stable::from_blob(const_cast<int8_t*>(data), {weight_.size(1)},
                                          {weight_.stride(1)}, cpu, ScalarType::Char);
    open_whole(op_, "pack_weight", &row, [](const int8_t* at, int64_t bytes, Contents* contents) {
      Weight w;
      const std::string fault = open_weight(at, bytes, &w);
      *contents = contents_of(w);
      return fault;
    });
    return static_cast<const int8_t*>(rows_.emplace_back(row).const_data_ptr());
  }

  const char* op_;
  const int64_t k_;
  const WeightLayoutArgument layout_;
  const Tensor weight_;
  std::optional<Tensor> bias_;
  std::deque<std::vector<float>> copies_;
  std::deque<Tensor> rows_;
};

}  // namespace qfx::cpu
