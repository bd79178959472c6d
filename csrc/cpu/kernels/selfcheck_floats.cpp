#include "cpu/kernels/selfcheck_floats.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck_problem.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {

constexpr int kGroups = 12, kStride = kGroups * kGroup + 1;

// Rows of floats whose sums round, and a panel of every code.
struct FloatProblem {
  float x[kMaxFloatRows * kStride], scale[kPanel];
  int8_t b[kGroups * kPanel * kGroup];

  FloatProblem() {
    for (int i = 0; i < kMaxFloatRows * kStride; ++i) {
      x[i] = static_cast<float>(code_at(i / kStride + kLines - 1, i, -128, 127)) / 3.f;
    }
    for (int n = 0; n < kPanel; ++n) scale[n] = 1.f / static_cast<float>(n + 1);
    for (size_t i = 0; i < std::size(b); ++i) b[i] = static_cast<int8_t>(i);
  }
};

// All that the kernels of a table compute from it.
std::vector<float> results_of(const WeightOnlyKernels& kernels, const FloatProblem& of) {
  std::vector<float> found;
  std::vector<float> w(kGroups * kGroup * kPanel);
  kernels.floats_of_codes(of.b, kGroups, w.data());
  found = w;
  const auto add = [&](const auto& values) {
    found.insert(found.end(), std::begin(values), std::end(values));
  };
  for (const auto& tiles : kernels.codes) {
    for (const CodesTileFn tile : tiles) {
      float sums[kMaxFloatRows * kPanel] = {};
      tile(of.x, kStride, of.b, kGroups, 0, sums);
      add(sums);
    }
  }
  const FloatTile whole = {of.x, kStride, w.data(), kGroups};
  for (int rows = 1; rows <= kMaxFloatRows; ++rows) {
    float chains[kMaxFloatRows * 2 * kPanel] = {}, sums[kMaxFloatRows * kPanel] = {};
    for (int i = 0; i < 2; ++i) {  // the second time they go on
      kernels.chains[rows - 1](whole, chains);
      kernels.scaled[rows - 1](whole, of.scale, sums);
    }
    add(chains);
    add(sums);
  }
  return found;
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

}  // namespace

std::string fault_of_weight_only(const Kernels& kernels) {
  static const FloatProblem problem;
  const auto found = results_of(*kernels.sums->weight_only, problem);
  const auto expected = results_of(*kernels_ref().sums->weight_only, problem);
  if (std::equal(found.begin(), found.end(), expected.begin(), same_bits)) return "";
  return std::string("kernel weight_only__") + kernels.isa +
         " computes a wrong product on this processor (of float rows and every code)";
}

}  // namespace qfx::cpu
