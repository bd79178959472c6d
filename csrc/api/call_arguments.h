// Arguments of operators in calls of generated code: addresses of tensors, and numbers.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/answer.h"
#include "cpu/ops/linear.h"
#include "implement.h"

namespace qfx {

using Numbers = std::span<const int64_t>;

// The numbers of a weight, in their order.
enum WeightNumber {
  kWeightBytes,
  kDtypeOfBias,  // or -1 without a bias
  kActivation,
  kLayout,
  kWeightNumbers = kLayout + 5
};

// `op` is named in errors, as below.
inline Dtype dtype_at(const char* op, int64_t place) {
  if (place >= 0 && place < kDtypes) return static_cast<Dtype>(place);
  throw std::invalid_argument(std::string(op) + ": unknown dtype");
}

inline Activation activation_at(const char* op, int64_t place) {
  if (place >= 0 && place < static_cast<int64_t>(std::size(kActivations))) {
    return kActivations[place];
  }
  throw std::invalid_argument(std::string(op) + ": unknown activation");
}

// The tensors of a call, one after the other.
class TensorsOfCall {
 public:
  TensorsOfCall(const char* op, std::span<const void* const> tensors) : op_(op), left_(tensors) {}

  template <typename T>
  const T* take() {
    if (left_.empty()) fail("fewer tensors than announced");
    const void* first = left_.front();
    left_ = left_.subspan(1);
    return static_cast<const T*>(first);
  }

  void finish() const {
    if (!left_.empty()) fail("more tensors than announced");
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    throw std::invalid_argument(std::string(op_) + ": " + why);
  }

  const char* op_;
  std::span<const void* const> left_;
};

// Takes the weight, and its bias where it has one.
inline cpu::LinearWeightAt weight_of(const char* op, TensorsOfCall& from, Numbers numbers) {
  cpu::LinearWeightAt w = {};
  w.weight = from.take<int8_t>();
  w.weight_bytes = numbers[kWeightBytes];
  w.layout = layout_argument_of(op, numbers.subspan(kLayout, 5));
  w.activation = activation_at(op, numbers[kActivation]);
  if (numbers[kDtypeOfBias] >= 0) {
    w.bias_dtype = dtype_at(op, numbers[kDtypeOfBias]);
    w.bias = from.take<void>();
  }
  return w;
}

// As `answer`; the call's name goes in front of an error of memory.
template <typename Call>
QfxStatus answer_call(const char* name, const Call& call) noexcept {
  return answer([&] {
    try {
      call();
    } catch (const OutOfMemory& why) {
      throw std::runtime_error(std::string(name) + ": " + why.what());
    }
  });
}

}  // namespace qfx
