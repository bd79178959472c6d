// Lines of integer sums become outputs, with 512-bit registers. (E1)
#pragma once

#include "cpu/kernels/x86/lines.h"

namespace qfx::cpu {
namespace {

template <Activation A, Dtype D>
void finish_lines(const EpilogueArgs& e) {
  Lines<A, D, 1, true, true> lines(&e);
  while (lines.left()) lines.some();
}

inline void finish_all_lines(const EpilogueArgs* args) {
  with_output(args->activation, args->dtype,
              [&]<Activation A, Dtype D>() { finish_lines<A, D>(*args); });
}

}  // namespace
}  // namespace qfx::cpu
