// native_tests [part ...]: the kernels of every instruction set that this machine has, against
// their definition and between pages that fault. One line a kernel; exit status 1 and a sentence at
// the first difference.
#include <algorithm>
#include <cstdio>

#include "cpu/kernels/selfcheck.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr struct {
  const char* name;
  void (*check)(const Kernels& kernels);
} kParts[] = {{"tiles", check_tiles},
              {"rows", check_rows},
              {"rotate", check_rotate},
              {"columns", check_columns},
              {"epilogue", check_epilogue},
              {"weight_only", check_weight_only},
              {"attention", check_attention},
              {"cache", check_cache},
              {"binary", check_binary},
              {"gemm", check_gemm},
              {"groups", check_groups},
              {"experts", check_experts},
              {"convolution", check_convolutions},
              {"depthwise", check_depthwise},
              {"lowbit", check_lowbit},
              {"program", check_program},
              {"doctored", check_doctored},
              {"doctored_lowbit", check_doctored_lowbit}};

void announce() {
  for (Isa isa : compiled_isas()) {
    std::printf("%s: %s\n", cpu::name_of(isa), supported(isa) ? "tested" : "not on this processor");
  }
  for (const std::string& fault : faults()) throw Failure(fault);
}

void run(const std::vector<std::string>& wanted) {
  announce();
  check_guards();
  check_parts();
  for (const std::string& name : wanted) {
    const auto named = [&](const auto& part) { return name == part.name; };
    if (std::none_of(std::begin(kParts), std::end(kParts), named)) {
      throw Failure("there is no part '" + name + "'");
    }
  }
  for (const auto& part : kParts) {
    const bool all = wanted.empty();
    if (!all && std::find(wanted.begin(), wanted.end(), part.name) == wanted.end()) continue;
    for (const Kernels* kernels : kernels_here()) part.check(*kernels);
  }
}

}  // namespace
}  // namespace qfx::test

int main(int count, char** arguments) {
  qfx::test::report_faults();
  try {
    qfx::test::run({arguments + 1, arguments + count});
  } catch (const std::exception& failure) {
    std::printf("%s\n", failure.what());
    return 1;
  }
  return 0;
}
