// A linear by a weight of any kind, made ready to run beside others: its rows, and what is done
// with the panels of its weight. Only this file and linear.cpp distinguish the kinds.
#pragma once

#include <memory>

#include "cpu/gemm/linear.h"
#include "cpu/gemm/meetings.h"

namespace qfx::cpu {

// All that it is made of must outlive it.
class LinearJob {
 public:
  virtual ~LinearJob() = default;
  virtual Meeting meeting() const = 0;
};

// Rows order[0], order[1], ... of codes q [.., K], whose scales and zero points lie in their order.
// `narrow`: all codes lie in [-64, 63].
struct CodesInOrder {
  const int8_t* q;
  const int32_t* order;
  int64_t count;
  RowValues<float> scale;
  RowValues<int32_t> zero;
  bool narrow;
};

// The row m of `from` becomes row m of the output.
std::unique_ptr<LinearJob> job_of_codes(const Kernels& kernels, const CodesInOrder& from,
                                        const Linear& linear, GroupedMemory& memory);

// `shared`: the code of all rows, or null. `scales`: memory for a number for each row.
struct FloatsOfJob {
  QuantizedFloats from;
  const TensorCode* shared;
  float* scales;
};
std::unique_ptr<LinearJob> job_of_floats(const Kernels& kernels, const FloatsOfJob& of,
                                         const Linear& linear, GroupedMemory& memory);

}  // namespace qfx::cpu
