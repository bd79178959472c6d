// Fingerprints of a tensor's values: a hash of all its bytes, or of some of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qfx::python {

// 64 bits; another value of any one word of 8 bytes is always another hash.
uint64_t hash_bytes(const char* bytes, size_t count);

// A tensor's elements in memory. Strides in elements, none negative.
struct Region {
  uintptr_t address = 0;
  std::vector<int64_t> sizes, strides;
  int64_t element = 0;  // bytes
};

// Some of a region's bytes: kPlaces cache lines, each somewhere in its own share of the region, in
// the order of memory. A region as small as that is taken whole.
class Sample {
 public:
  static constexpr int64_t kPlaces = 6;
  static constexpr int64_t kLine = 64;  // bytes

  explicit Sample(const Region& region);

  // Starts the reading; harmless where the region is gone.
  void prefetch() const {
    for (const Span& span : spans_) {
      for (int64_t i = 0; i < span.bytes; i += kLine) __builtin_prefetch(span.data + i);
    }
  }
  // The region must still be there.
  uint64_t hash() const;
  int64_t bytes() const;

 private:
  struct Span {
    const char* data;
    int64_t bytes;
  };
  std::vector<Span> spans_;
};

}  // namespace qfx::python
