// Which kernel runs an integer product. The only place that decides it; pure functions of sizes,
// the GPU and the environment.
#pragma once

#include <string>
#include <vector>

#include "cuda/core/gpu.h"
#include "cuda/gemm/plan.h"
#include "cuda/sm90/config.h"

namespace qfx::cuda {

// "portable" (gemm.cuh, which plans for itself), or a row of kernels.inc with parts of K.
struct Choice {
  std::string kernel;
  int splits;

  friend bool operator==(const Choice&, const Choice&) = default;
};

struct Candidate {
  const char* name;
  sm90::Config config;
};

// The rows of kernels.inc, in its order.
const std::vector<Candidate>& candidates();
const Candidate& candidate(const std::string& name);

// A recorded run on a GPU found this kernel right, and the fastest for these sizes.
struct Measured {
  const char* gpu;
  sm90::Operands operands;
  Sizes size;
  Choice choice;
};

// measured.inc, which benchmarks/gpu writes.
const std::vector<Measured>& measurements();

// What the rows of `measured` for this GPU and these operands say of the sizes that are nearest, as
// ratios. Without such a row it is "portable": nothing else has been seen to be right there.
Choice choose(sm90::Operands operands, const Sizes& size, const Gpu& gpu,
              const std::vector<Measured>& measured);

// The Hopper kernel that should be the fastest by arithmetic alone.
Choice choose_by_rule(sm90::Operands operands, const Sizes& size, int multiprocessors);

// choose(), unless `forced`, the value of QFX_CUDA_KERNEL, is "portable", "sm90" (by rule), or the
// name of a Hopper kernel for these operands, perhaps with parts of K: "s8_swap16/4". Empty: not
// forced. An unknown name, or a GPU that has no Hopper kernels, is an error.
Choice choose_or_force(sm90::Operands operands, const Sizes& size, const Gpu& gpu,
                       const std::string& forced);

}  // namespace qfx::cuda
