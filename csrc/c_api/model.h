// What qfx_program stands for: a file of programs in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "c_api/decoder.h"
#include "c_api/graph.h"
#include "c_api/tensor_file.h"

namespace qfx {

// Either a language model or a graph of fixed shapes.
class Model {
  TensorFile file_;  // lives longest

 public:
  // max_memory: 0 for the memory of the machine. Throws Unreadable, Refused, OutOfMemory, and
  // std::invalid_argument for instructions that are no program.
  Model(const std::string& path, int64_t max_memory);

  std::optional<Decoder> decoder;
  std::optional<Graph> graph;
};

}  // namespace qfx
