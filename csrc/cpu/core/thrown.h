// The first exception of several threads, kept until all of them are done.
#pragma once

#include <atomic>
#include <memory>

namespace qfx::cpu {

// std::exception_ptr does this for every type, with functions that C++ libraries before that of GCC
// 11 do not have. Here those types that this library throws stay what they are, and others become a
// std::runtime_error with their text.
class FirstThrown {
 public:
  FirstThrown();
  ~FirstThrown();

  // In a catch block: keeps its exception, unless another thread was first.
  void keep() noexcept;
  // Throws what was kept, if anything was. No thread may still be in `keep`.
  void throw_again() const;

  struct Kept;

 private:
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  std::unique_ptr<const Kept> kept_;
};

}  // namespace qfx::cpu
