// Copies, sums and means along the last axis, and rows looked up in a table.
#include <bit>
#include <cstring>

#include "cpu/program/instruction.h"
#include "cpu/program/loops.h"
#include "half.h"

namespace qfx::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;

  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

// A bool.
struct Flag {
  uint8_t value;

  explicit Flag(int64_t x) : value(x != 0) {}
};

template <typename To, typename From>
struct Copies final : Instruction {
  Loops<2> loops;

  explicit Copies(const std::array<Operand, 2>& operands) : loops(operands) {}

  double work() const override { return loops.elements(); }

  void run(const Kernels&, char* const* slots) const override {
    loops.each(slots, [&](int64_t n, const auto& stride, const auto& at) {
      To* out = reinterpret_cast<To*>(at[0]);
      const From* x = reinterpret_cast<const From*>(at[1]);
      if (stride[0] == 1 && stride[1] == 1) {
        for (int64_t i = 0; i < n; ++i) out[i] = static_cast<To>(x[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) out[i * stride[0]] = static_cast<To>(x[i * stride[1]]);
      }
    });
  }
};

// 16 sums side by side, then their sum.
float sum_of(const float* x, int64_t n) {
  constexpr int kSums = 16;
  float sums[kSums] = {}, total = 0.f;
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int s = 0; s < kSums; ++s) sums[s] += x[i + s];
  }
  for (int s = 0; i < n; ++i, ++s) sums[s] += x[i];
  for (int s = 0; s < kSums; ++s) total += sums[s];
  return total;
}

// Each over `divisor`.
struct Sums final : Instruction {
  Operand out, x;
  float divisor;

  Sums(const Operand& out, const Operand& x, float divisor) : out(out), x(x), divisor(divisor) {}

  double work() const override { return static_cast<double>(x.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    float* to = out.in<float>(slots);
    const float* from = x.in<float>(slots);
    const int64_t n = x.size(-1), rows = out.elements();
    parallel(rows, work_of_elements(x.elements()), [&](int64_t m, int64_t end) {
      for (; m < end; ++m) to[m] = sum_of(from + m * n, n) / divisor;
    });
  }
};

struct Lookups final : Instruction {
  Operand out, indices, table;

  Lookups(const Operand& out, const Operand& indices, const Operand& table)
      : out(out), indices(indices), table(table) {}

  double work() const override { return static_cast<double>(indices.elements() + out.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    const int64_t rows = indices.elements(), bytes = table.size(1) * size_of(table.element);
    const int64_t* place = indices.in<int64_t>(slots);
    for (int64_t i = 0; i < rows; ++i) {
      if (place[i] < 0 || place[i] >= table.size(0)) {
        throw std::out_of_range("token " + std::to_string(place[i]) + " is none of the " +
                                std::to_string(table.size(0)) + " of the vocabulary");
      }
      std::memmove(out.in<char>(slots) + i * bytes, table.in<char>(slots) + place[i] * bytes,
                   static_cast<size_t>(bytes));
    }
  }
};

}  // namespace

Made copy_of(Words& words) {
  const std::array<Operand, 2> operands = {words.written(words.operand()), words.operand()};
  const Element to = operands[0].element, from = operands[1].element;
  if (to == Element::kFloat && from == to) return std::make_unique<Copies<float, float>>(operands);
  if (to == Element::kLong && from == to) {
    return std::make_unique<Copies<int64_t, int64_t>>(operands);
  }
  if (to == Element::kInt && from == to) {
    return std::make_unique<Copies<int32_t, int32_t>>(operands);
  }
  if (size_of(to) == 2 && from == to) {
    return std::make_unique<Copies<int16_t, int16_t>>(operands);
  }
  if (to == Element::kByte && from == to) return std::make_unique<Copies<int8_t, int8_t>>(operands);
  if (to == Element::kByte && from == Element::kLong) {
    return std::make_unique<Copies<Flag, int64_t>>(operands);
  }
  if (to == Element::kFloat && from == Element::kLong) {
    return std::make_unique<Copies<float, int64_t>>(operands);
  }
  if (to == Element::kFloat && from == Element::kByte) {
    return std::make_unique<Copies<float, uint8_t>>(operands);
  }
  if (to == Element::kFloat && from == Element::kBFloat16) {
    return std::make_unique<Copies<float, BFloat16>>(operands);
  }
  if (to == Element::kFloat && from == Element::kHalf) {
    return std::make_unique<Copies<float, Half>>(operands);
  }
  wrong_program("no such copy");
}

Made sum_of(Words& words, bool mean) {
  const Operand out = words.written(words.matrix(Element::kFloat));
  const Operand x = words.matrix(Element::kFloat);
  const int64_t n = x.size(-1);
  expect(n > 0 && out.elements() * n == x.elements(), "a sum of other rows");
  return std::make_unique<Sums>(out, x, mean ? static_cast<float>(n) : 1.f);
}

Made embedding_of(Words& words) {
  const Operand out = words.written(words.matrix()), indices = words.matrix(Element::kLong);
  const Operand table = words.matrix(out.element);
  expect(table.axes == 2 && out.elements() == indices.elements() * table.size(1),
         "rows of another table");
  return std::make_unique<Lookups>(out, indices, table);
}

}  // namespace qfx::cpu
