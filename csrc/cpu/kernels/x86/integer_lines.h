// Lines of integer sums become outputs, with 512-bit registers. (E1)
#pragma once

#include "cpu/kernels/x86/lines.h"

namespace qfx::cpu {
namespace {

template <Activation A, Dtype D>
void finish_lines(const EpilogueArgs& e) {
  Lines<A, D, 1, true> lines(&e);
  while (lines.left()) lines.some();
}

template <Activation A>
void finish_lines(const EpilogueArgs& e) {
  if (e.dtype == Dtype::kFloat32) return finish_lines<A, Dtype::kFloat32>(e);
  if (e.dtype == Dtype::kBFloat16) return finish_lines<A, Dtype::kBFloat16>(e);
  finish_lines<A, Dtype::kFloat16>(e);
}

inline void finish_all_lines(const EpilogueArgs* args) {
  with_activation(args->activation, [&](auto a) { finish_lines<decltype(a)::value>(*args); });
}

}  // namespace
}  // namespace qfx::cpu
