// Memory that a thread keeps between calls, so that an operator need not allocate what it works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "memory.h"

namespace qfx::cpu {

// Grows, never shrinks; 64-byte aligned. The contents are undefined after `get`, which throws
// OutOfMemory and is then empty.
class Scratch {
 public:
  template <typename T>
  T* get(int64_t count) {
    if (static_cast<size_t>(count) > size_ / sizeof(T)) grow(count, sizeof(T));
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  void grow(int64_t count, int64_t element) {
    data_.reset();
    size_ = 0;
    if (count >= 0 && count <= std::numeric_limits<int64_t>::max() / element) {
      const size_t bytes = static_cast<size_t>(count * element);
      data_.reset(static_cast<char*>(::operator new(bytes, kAlign, std::nothrow)));
      size_ = data_ ? bytes : 0;
    }
    if (!data_) throw OutOfMemory(bytes_of(count, element), "which it works in");
  }

  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace qfx::cpu
