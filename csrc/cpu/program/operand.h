// Where an instruction of a program reads and writes: a strided part of one of its slots of memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace qfx::cpu {

// kByte: int8, uint8 and bool. The order is that of qfx/programs/bytecode.py.
enum class Element : int64_t { kFloat, kLong, kInt, kByte, kBFloat16, kHalf };
inline constexpr int64_t kElements = 6;

constexpr int64_t size_of(Element element) {
  constexpr std::array<int64_t, kElements> kSizes = {4, 8, 4, 1, 2, 2};
  return kSizes[static_cast<size_t>(element)];
}

inline constexpr int64_t kMostAxes = 6;

// Strides count elements and are not negative.
struct Operand {
  int64_t slot, offset;  // in bytes
  Element element;
  int64_t axes;
  std::array<int64_t, kMostAxes> sizes, strides;

  int64_t size(int64_t axis) const { return sizes[axis < 0 ? axes + axis : axis]; }
  int64_t stride(int64_t axis) const { return strides[axis < 0 ? axes + axis : axis]; }
  int64_t elements() const;
  bool contiguous() const;
  // Each element has memory of its own, so there are no more of them than the slot has room for.
  bool distinct() const;

  template <typename T>
  T* in(char* const* slots) const {
    return reinterpret_cast<T*>(slots[slot] + offset);
  }
};

// A file may hold programs, so all that is read of one is checked: std::invalid_argument otherwise.
[[noreturn]] inline void wrong_program(const std::string& why) {
  throw std::invalid_argument("not a program of this build: " + why);
}

inline void expect(bool so, const char* why) {
  if (!so) wrong_program(why);
}

// The words of one instruction, taken one after the other.
class Words {
 public:
  Words(std::span<const int64_t> words, std::span<const int64_t> slot_bytes)
      : words_(words), slot_bytes_(slot_bytes) {}

  int64_t take();
  int take_int();
  float take_float();
  // Lies in its slot.
  Operand operand();
  Operand operand(Element element);
  // Contiguous, of the shape [.., columns].
  Operand matrix();
  Operand matrix(Element element);
  // What the instruction writes to, each element of which has memory of its own.
  Operand written(const Operand& o);
  const std::vector<int64_t>& written_slots() const { return written_; }
  bool left() const { return next_ < words_.size(); }

 private:
  std::span<const int64_t> words_, slot_bytes_;
  std::vector<int64_t> written_;
  size_t next_ = 0;
};

}  // namespace qfx::cpu
