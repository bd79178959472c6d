// Memory that a thread keeps between calls, so that an operator need not allocate what it works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace qfx::cpu {

// Grows, never shrinks; 64-byte aligned. The contents are undefined after `get`.
class Scratch {
 public:
  template <typename T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<char*>(::operator new(bytes, kAlign)));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace qfx::cpu
