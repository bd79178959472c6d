#include "c_api/pages.h"

#include <sys/mman.h>

#include <algorithm>

#include "memory.h"

namespace qfx {

Pages::Pages(int64_t bytes, const std::string& what_for) {
  constexpr int64_t kMost = int64_t{1} << 46, kHuge = 1 << 21;
  const int64_t align = bytes < kHuge ? 1 : kHuge;
  size_ = std::max<int64_t>(bytes, 1) + align - 1;
  if (size_ <= kMost) {
    mapped_ = mmap(nullptr, static_cast<size_t>(size_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (mapped_ == nullptr || mapped_ == MAP_FAILED) {
    mapped_ = nullptr;
    throw OutOfMemory(std::to_string(bytes), what_for);
  }
  const auto at = reinterpret_cast<uintptr_t>(mapped_);
  begin_ = static_cast<char*>(mapped_) + (align - at % align) % align;
#ifdef MADV_HUGEPAGE
  if (align == kHuge) madvise(begin_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
}

Pages::~Pages() {
  if (mapped_ != nullptr) munmap(mapped_, static_cast<size_t>(size_));
}

}  // namespace qfx
