// Memory that was requested and could not be allocated.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace qfx {

// implement.h puts the operator's name in front.
class OutOfMemory final : public std::runtime_error {
 public:
  // "It asked for 64 bytes, <what for>"
  OutOfMemory(const std::string& bytes, const std::string& what_for)
      : std::runtime_error("out of memory. It asked for " + bytes + " bytes, " + what_for) {}
};

// The product as text, also where it does not fit an int64_t.
inline std::string bytes_of(int64_t count, int64_t element) {
  int64_t bytes = 0;
  if (count < 0 || __builtin_mul_overflow(count, element, &bytes)) return "more than 2^63";
  return std::to_string(bytes);
}

}  // namespace qfx
