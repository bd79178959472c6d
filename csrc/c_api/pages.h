// Pages of memory, zero at first, of which the system provides those that are used.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace qfx {

// The bytes of the cache lines that so many bytes take.
constexpr int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

class Pages {
 public:
  Pages() = default;
  // Large memory lies in huge pages where the system has them, which take fewer translations of
  // addresses. Throws OutOfMemory with what it is for.
  Pages(int64_t bytes, const std::string& what_for);
  Pages(Pages&& other) noexcept { *this = std::move(other); }
  Pages& operator=(Pages&& other) noexcept {
    std::swap(mapped_, other.mapped_), std::swap(size_, other.size_);
    std::swap(begin_, other.begin_);
    return *this;
  }
  ~Pages();

  char* begin() const { return begin_; }

 private:
  void* mapped_ = nullptr;
  int64_t size_ = 0;
  char* begin_ = nullptr;
};

}  // namespace qfx
