// Argument checks whose errors are sentences with the numbers. The kernels of each device check the
// devices of their operands.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <string>

namespace qfx {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "5x7", "scalar" for a tensor without dimensions.
template <typename Sizes>
std::string text_of(const Sizes& sizes) {
  std::string text;
  for (int64_t size : sizes) text.append(text.empty() ? "" : "x").append(std::to_string(size));
  return text.empty() ? "scalar" : text;
}

inline std::string shape_of(const Tensor& t) { return text_of(t.sizes()); }

inline const char* dtype_name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

inline void check_dtype(const char* op, const char* what, const Tensor& t,
                        std::initializer_list<ScalarType> allowed) {
  for (ScalarType dtype : allowed) {
    if (t.scalar_type() == dtype) return;
  }
  std::string names;
  for (ScalarType dtype : allowed)
    names.append(names.empty() ? "" : " or ").append(dtype_name(dtype));
  STD_TORCH_CHECK(false, op, ": ", what, " has dtype ", dtype_name(t.scalar_type()), ", expected ",
                  names);
}

inline void check_float(const char* op, const char* what, const Tensor& t) {
  check_dtype(op, what, t, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
}

inline void check_vector(const char* op, const char* what, const Tensor& t, int64_t n) {
  STD_TORCH_CHECK(t.dim() == 1 && t.numel() == n, op, ": ", what, " has shape ", shape_of(t),
                  ", expected ", n, ", one element for each output feature");
}

// One value for each of `rows` rows, or one for all.
inline void check_per_row(const char* op, const char* what, const Tensor& t, int64_t rows) {
  STD_TORCH_CHECK(t.numel() == rows || t.numel() == 1, op, ": ", what, " has ", t.numel(),
                  " elements, expected one for each of the ", rows, " rows or a single one");
}

}  // namespace qfx
