// Packed weights that an instruction holds, and how the rows that meet them become codes.
#pragma once

#include "cpu/gemm/integrity.h"
#include "cpu/gemm/linear.h"
#include "cpu/program/operand.h"

namespace qfx::cpu {

// The words of a code: bits, symmetric, per_tensor, group, rotation.
struct RowsCode {
  CodeSpec spec;
  int64_t group;
  int rotation;

  RowsCode(Words& words, int64_t k) {
    spec.bits = words.take_int();
    spec.symmetric = words.take() != 0;
    spec.per_tensor = words.take() != 0;
    group = words.take();
    rotation = words.take_int();
    const bool known = spec.bits >= 2 && spec.bits <= 8 && is_rotation(rotation);
    expect(k > 0 && known, "a linear of unknown kind");
  }

  void check(const Weight& w) const {
    expect(group == 0 || (!w.one_scale() && group == w.shape().group), "groups of another size");
  }
};

// A weight that is known when the program is made.
inline Weight opened(const int8_t* data, int64_t bytes) {
  Weight w;
  std::string fault = open_weight(data, bytes, &w);
  if (fault.empty()) fault = fault_at_first_use(data, bytes, contents_of(w));
  if (!fault.empty()) wrong_program("a weight: " + fault);
  return w;
}

inline void expect_given(const Operand& packed, char* const* slots) {
  expect(slots[packed.slot] != nullptr, "a weight is not given when the program is made");
}

}  // namespace qfx::cpu
