// What a router does to the rows of its logits: softmax, and which of their elements are greatest.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/program/instruction.h"
#include "cpu/program/loops.h"

namespace qfx::cpu {
namespace {

// f(m) for each row of a matrix of so many elements.
template <typename F>
void for_each_row(int64_t rows, int64_t elements, const F& f) {
  parallel(rows, work_of_elements(elements), [&](int64_t m, int64_t end) {
    for (; m < end; ++m) f(m);
  });
}

struct Softmax final : Instruction {
  Operand out, x;

  Softmax(const Operand& out, const Operand& x) : out(out), x(x) {}

  double work() const override { return static_cast<double>(x.elements()); }

  void run(const Kernels& kernels, char* const* slots) const override {
    const int64_t n = x.size(-1), padded = round_up(n, kPanel);
    for_each_row(x.elements() / n, x.elements(), [&](int64_t m) {
      thread_local Scratch scratch;
      float* p = scratch.get<float>(padded);
      float* to = out.in<float>(slots) + m * n;
      std::copy_n(x.in<float>(slots) + m * n, n, p);
      std::fill(p + n, p + padded, -std::numeric_limits<float>::infinity());
      float top = p[0];
      for (int64_t i = 1; i < n; ++i) top = std::isnan(p[i]) || p[i] > top ? p[i] : top;
      if (!std::isfinite(top)) {  // as infinity less infinity is
        std::fill_n(to, n, std::numeric_limits<float>::quiet_NaN());
        return;
      }
      const float sum = kernels.attention->exponentials(p, padded, top);
      for (int64_t i = 0; i < n; ++i) to[i] = p[i] / sum;
    });
  }
};

// The greatest come first, of equal ones that of the lower index, and NaN is greater than all.
struct TopK final : Instruction {
  Operand values, indices, x;

  TopK(const Operand& values, const Operand& indices, const Operand& x)
      : values(values), indices(indices), x(x) {}

  double work() const override { return static_cast<double>(x.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    const int64_t n = x.size(-1), k = values.size(-1);
    for_each_row(x.elements() / n, x.elements(), [&](int64_t m) {
      thread_local Scratch copy, places;
      float* from = copy.get<float>(n);  // in memory of its own: a program may write over x
      int64_t* order = places.get<int64_t>(n);
      std::copy_n(x.in<float>(slots) + m * n, n, from);
      std::iota(order, order + n, int64_t{0});
      std::partial_sort(order, order + k, order + n, [&](int64_t a, int64_t b) {
        const bool of_a = std::isnan(from[a]), of_b = std::isnan(from[b]);
        if (of_a != of_b) return of_a;
        return of_a || from[a] == from[b] ? a < b : from[a] > from[b];
      });
      for (int64_t i = 0; i < k; ++i) values.in<float>(slots)[m * k + i] = from[order[i]];
      std::copy_n(order, k, indices.in<int64_t>(slots) + m * k);
    });
  }
};

// An index of a row of n elements.
int64_t checked_index(int64_t index, int64_t n) {
  if (index >= 0 && index < n) return index;
  throw std::out_of_range("index " + std::to_string(index) + " is none of the " +
                          std::to_string(n) + " elements of a row");
}

template <typename T>
struct Gather final : Instruction {
  Operand out, x, indices;

  Gather(const Operand& out, const Operand& x, const Operand& indices)
      : out(out), x(x), indices(indices) {}

  double work() const override { return static_cast<double>(out.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    const int64_t n = x.size(-1), k = out.size(-1);
    for (int64_t i = 0; i < out.elements(); ++i) {
      const int64_t at = checked_index(indices.in<int64_t>(slots)[i], n);
      out.in<T>(slots)[i] = x.in<T>(slots)[i / k * n + at];
    }
  }
};

struct Scatter final : Instruction {
  Operand out, indices;
  float value;

  Scatter(const Operand& out, const Operand& indices, float value)
      : out(out), indices(indices), value(value) {}

  double work() const override { return static_cast<double>(indices.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    const int64_t n = out.size(-1), k = indices.size(-1);
    for (int64_t i = 0; i < indices.elements(); ++i) {
      const int64_t at = checked_index(indices.in<int64_t>(slots)[i], n);
      out.in<float>(slots)[i / k * n + at] = value;
    }
  }
};

// Both have rows, and as many.
void expect_rows(const Operand& a, const Operand& b) {
  expect(a.size(-1) > 0 && b.size(-1) > 0 && a.elements() / a.size(-1) == b.elements() / b.size(-1),
         "operands have different rows");
}

}  // namespace

Made softmax_of(Words& words) {
  const Operand out = words.written(words.matrix(Element::kFloat));
  const Operand x = words.matrix(Element::kFloat);
  expect_rows(out, x);
  expect(out.size(-1) == x.size(-1), "a softmax of another size");
  return std::make_unique<Softmax>(out, x);
}

Made top_k_of(Words& words) {
  const Operand values = words.written(words.matrix(Element::kFloat));
  const Operand indices = words.written(words.matrix(Element::kLong));
  const Operand x = words.matrix(Element::kFloat);
  expect_rows(values, x);
  expect_rows(values, indices);
  expect(values.size(-1) == indices.size(-1) && values.size(-1) <= x.size(-1),
         "more of a row than it has");
  return std::make_unique<TopK>(values, indices, x);
}

Made gather_of(Words& words) {
  const Operand out = words.written(words.matrix()), x = words.matrix(out.element);
  const Operand indices = words.matrix(Element::kLong);
  expect_rows(out, x);
  expect_rows(out, indices);
  expect(out.size(-1) == indices.size(-1), "as many indices as elements");
  if (out.element == Element::kLong) return std::make_unique<Gather<int64_t>>(out, x, indices);
  expect(out.element == Element::kFloat, "a gather of other elements");
  return std::make_unique<Gather<float>>(out, x, indices);
}

Made scatter_of(Words& words) {
  const Operand out = words.written(words.matrix(Element::kFloat));
  const Operand indices = words.matrix(Element::kLong);
  expect_rows(out, indices);
  return std::make_unique<Scatter>(out, indices, words.take_float());
}

}  // namespace qfx::cpu
