// The GPU that an operator runs on, through PyTorch's stable ABI. The tests' twin, for which the
// CPU is the GPU, is tests/cuda/device.cpp.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cuda/core/gpu.h"
#include "cuda/core/stream.h"

namespace qfx::cuda {

using torch::stable::Tensor;

// Makes the GPU of an operator's tensors the current one, until the end of the scope. An error if
// they are not all on it.
class OnDevice {
 public:
  template <typename... Others>
  OnDevice(const char* op, const Tensor& first, const Others&... others) : op_(op) {
    enter(first);
    (check(first, others), ...);
  }

  // PyTorch's current one.
  Stream stream() const { return stream_; }

  // Makes memory of the GPU zero, in the order of the stream.
  void clear(void* memory, size_t bytes) const;

  const Gpu& gpu() const;  // read once for each
  int multiprocessors() const { return gpu().multiprocessors; }

 private:
  void enter(const Tensor& first);
  void check(const Tensor& first, const Tensor& other) const;
  void check(const Tensor& first, const std::optional<Tensor>& other) const {
    if (other.has_value()) check(first, *other);
  }

  const char* op_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Stream stream_ = nullptr;
  int32_t index_ = 0;
};

}  // namespace qfx::cuda
