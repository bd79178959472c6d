// A string argument of an operator. PyTorch up to 2.13 takes a std::string argument out of the
// stack by copying it from one that it never frees (ToImpl<std::string> in
// stableivalue_conversions.h): 48 bytes a call, which also lie between the outputs and keep malloc
// from reusing their memory.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace qfx {

struct Text : std::string {
  using std::string::string;
};

}  // namespace qfx

namespace torch::stable::detail {

template <>
struct ToImpl<qfx::Text> {
  // Takes ownership of the string that `value` is the handle of.
  static qfx::Text call(StableIValue value, uint64_t /*build*/, bool /*internal*/) {
    const StringHandle handle = to<StringHandle>(value);
    size_t size = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &size));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    qfx::Text text(data, size);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail
