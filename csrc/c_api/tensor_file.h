// A safetensors file in memory: 8 bytes with the length of a header in JSON, the header, which
// names tensors with their types, shapes and bytes, and the bytes of the tensors without gaps.
//
// It is read, not mapped: tensors then begin at cache lines, as kernels need them to be fast, and
// what was checked stays as it is when the file changes or becomes shorter.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "c_api/pages.h"

namespace qfx {

// The file cannot be read: a sentence with its name.
struct Unreadable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  std::string type;  // "U8", "I64", ...
  std::vector<int64_t> shape;
  char* data;
  int64_t bytes;
};

struct TensorFile {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> tensors;
  Pages memory;  // of all tensors, each of which begins at a cache line

  // Throws Refused for a name that no tensor has.
  const Tensor& at(const std::string& name) const;
};

// Throws Unreadable, Refused for a file that is malformed, or whose tensors take more than
// `max_memory` bytes, and OutOfMemory.
TensorFile read_tensors(const std::string& path, int64_t max_memory);

}  // namespace qfx
