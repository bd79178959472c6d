#include "cpu/program/operand.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace qfx::cpu {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 40;

// a * b, both not negative and the result of a size that memory can have.
int64_t bounded_product(int64_t a, int64_t b) {
  expect(a == 0 || b <= kMostElements / a, "an operand is too large");
  return a * b;
}

// One after the last element, 0 of none. Where there is none, products of the other sizes and of
// strides are bounded too.
int64_t extent(const Operand& o) {
  int64_t last = 0, count = 1;
  for (int64_t d = 0; d < o.axes; ++d) {
    const int64_t size = std::max<int64_t>(o.sizes[d], 1);
    expect(o.strides[d] <= kMostElements, "an operand is too large");
    count = bounded_product(count, size);
    last += bounded_product(size - 1, o.strides[d]);
    expect(last <= kMostElements, "an operand is too large");
  }
  return o.elements() == 0 ? 0 : last + 1;
}

}  // namespace

int64_t Operand::elements() const {
  int64_t count = 1;
  for (int64_t d = 0; d < axes; ++d) count *= sizes[d];
  return count;
}

bool Operand::contiguous() const {
  if (elements() == 0) return true;
  int64_t step = 1;
  for (int64_t d = axes - 1; d >= 0; --d) {
    if (sizes[d] != 1 && strides[d] != step) return false;
    step *= sizes[d];
  }
  return true;
}

bool Operand::distinct() const {
  if (elements() == 0) return true;
  std::array<int64_t, kMostAxes> order;
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.begin() + axes,
            [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  int64_t last = 0;  // the farthest element of the axes before
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t d = order[static_cast<size_t>(i)];
    if (sizes[d] == 1) continue;
    if (strides[d] <= last) return false;
    last += (sizes[d] - 1) * strides[d];
  }
  return true;
}

int64_t Words::take() {
  expect(left(), "an instruction ends too early");
  return words_[next_++];
}

int Words::take_int() {
  const int64_t word = take();
  expect(std::in_range<int>(word), "a number is too large");
  return static_cast<int>(word);
}

float Words::take_float() { return static_cast<float>(std::bit_cast<double>(take())); }

Operand Words::operand() {
  Operand o = {};
  o.slot = take();
  expect(o.slot >= 0 && o.slot < static_cast<int64_t>(slot_bytes_.size()), "no such slot");
  o.offset = take();
  const int64_t element = take();
  expect(element >= 0 && element < kElements, "no such element");
  o.element = static_cast<Element>(element);
  o.axes = take();
  expect(o.axes >= 0 && o.axes <= kMostAxes, "an operand has too many axes");
  for (int64_t d = 0; d < o.axes; ++d) o.sizes[d] = take();
  for (int64_t d = 0; d < o.axes; ++d) o.strides[d] = take();
  for (int64_t d = 0; d < o.axes; ++d) {
    expect(o.sizes[d] >= 0 && o.strides[d] >= 0, "an operand has a negative size or stride");
  }
  const int64_t bytes = extent(o) * size_of(o.element);
  expect(o.offset >= 0 && o.offset <= slot_bytes_[o.slot] &&
             bytes <= slot_bytes_[o.slot] - o.offset && o.offset % size_of(o.element) == 0,
         "an operand leaves its slot");
  return o;
}

Operand Words::operand(Element element) {
  const Operand o = operand();
  expect(o.element == element, "an operand has elements of another type");
  return o;
}

Operand Words::matrix() {
  const Operand o = operand();
  expect(o.axes >= 1 && o.contiguous(), "an operand is not contiguous");
  return o;
}

Operand Words::matrix(Element element) {
  const Operand o = matrix();
  expect(o.element == element, "an operand has elements of another type");
  return o;
}

Operand Words::written(const Operand& o) {
  expect(o.distinct(), "an output overlaps itself");
  written_.push_back(o.slot);
  return o;
}

}  // namespace qfx::cpu
