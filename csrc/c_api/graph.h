// A graph that was saved: a program with its weights, and where its inputs and results are. See
// qfx/programs/serialization.py, which writes it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "c_api/json.h"
#include "c_api/tensor_file.h"
#include "cpu/program/program.h"
#include "include/qfx/programs.h"

namespace qfx {

inline constexpr int64_t kMostBytes = int64_t{1} << 48;

// The product, or Refused with what it is of, beyond kMostBytes.
int64_t product_of(std::span<const int64_t> factors, const std::string& what);

int64_t element_of(qfx_dtype dtype);

// The type and shape of an array.
struct Kind {
  qfx_dtype dtype;
  std::vector<int64_t> sizes;

  int64_t bytes() const;
  bool operator==(const Kind&) const = default;
};

// Every member of a description that is not as `restored` of serialization.py has it is Refused.
class Graph {
 public:
  // The tensors outlive it.
  Graph(const Json& described, const TensorFile& file);

  struct Result {
    Kind kind;
    bool of_input;  // it is a view of an input, else of new memory
    size_t place;   // of the input, or of the memory
    std::vector<int64_t> strides;
    int64_t offset;  // in elements
  };
  const std::vector<Kind>& inputs() const { return inputs_; }
  const std::vector<Result>& results() const { return results_; }

  // One run's multiply-accumulates, and the elements of what multiplies none.
  double work() const { return program_->work(); }
  // Whether a run writes to one of the first `count` inputs.
  bool writes(size_t count) const;

  // Runs it on the inputs at these addresses.
  void run(std::span<const int64_t> inputs);

  // Copies row `row` of each matrix of a result of the last run, whose last two axes are rows and
  // columns; the whole result without a row.
  void copy(size_t result, std::optional<int64_t> row, char* to) const;

 private:
  Result result_of(const Json& told) const;
  std::vector<int64_t> given_of(const Json& told);

  std::vector<Kind> inputs_;
  std::vector<int64_t> made_;  // the bytes of new memory
  std::vector<Result> results_;
  struct Given {
    bool of_input;
    size_t place;
  };
  std::vector<Given> given_;  // the memory of each slot of the program that a run gives it
  size_t constants_ = 0;
  std::unique_ptr<cpu::Program> program_;
  std::vector<Pages> memory_;           // of made_
  std::vector<int64_t> addresses_;      // of the inputs of the last run
  std::vector<int64_t> all_addresses_;  // of given_
};

// A name such as "float32".
const char* name_of(qfx_dtype dtype);

// Throws Refused unless the inputs that a description of a graph names are these.
std::vector<Kind> kinds_of(const Json& told);

}  // namespace qfx
