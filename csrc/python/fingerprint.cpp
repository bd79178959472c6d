#include "python/fingerprint.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace qfx::python {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kWord = 8;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio, odd

uint64_t rotated(uint64_t word) { return word << 29 | word >> 35; }

// One to one in `word` as in `sum`; the rotation takes the highest bit, a float's sign, down to
// where the product spreads it.
uint64_t mixed(uint64_t sum, uint64_t word) {
  uint64_t turned = rotated(sum ^ word);
  asm(""
      : "+r"(turned));  // else compilers build this product from those that SSE2 has: half as fast
  return turned * kOdd;
}

// Lanes that do not wait for each other: memory is the limit.
class Hash {
 public:
  Hash() { std::iota(lanes_, lanes_ + kLanes, uint64_t{1}); }

  void add(const char* bytes, size_t count) {
    uint64_t words[kLanes];
    for (; count >= sizeof words; bytes += sizeof words, count -= sizeof words) {
      std::memcpy(words, bytes, sizeof words);
      for (int i = 0; i < kLanes; ++i) lanes_[i] = mixed(lanes_[i], words[i]);
    }
    if (count == 0) return;
    std::memset(words, 0, sizeof words);
    std::memcpy(words, bytes, count);
    for (int i = 0; i < kLanes; ++i) lanes_[i] = mixed(lanes_[i], words[i]);
  }

  uint64_t value() const { return std::accumulate(lanes_, lanes_ + kLanes, uint64_t{0}, mixed); }

 private:
  uint64_t lanes_[kLanes];
};

// The region as runs of bytes without gaps, `count` of them, addressed by the axes that remain.
struct Runs {
  int64_t bytes, count = 1;
  std::vector<std::pair<int64_t, int64_t>> axes;  // (size, stride in bytes), the slowest first

  explicit Runs(const Region& region) : bytes(region.element) {
    for (size_t i = 0; i < region.sizes.size(); ++i) {
      const bool moves = region.sizes[i] != 1 && region.strides[i] != 0;  // not an expanded axis
      if (moves) axes.emplace_back(region.sizes[i], region.strides[i] * region.element);
    }
    std::sort(axes.begin(), axes.end(), [](auto a, auto b) { return a.second > b.second; });
    while (!axes.empty() && axes.back().second == bytes) {
      bytes *= axes.back().first;
      axes.pop_back();
    }
    for (const auto& axis : axes) count *= axis.first;
  }

  // Bytes from the region's start to run i.
  int64_t offset(int64_t i) const {
    int64_t offset = 0;
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
      offset += i % axis->first * axis->second;
      i /= axis->first;
    }
    return offset;
  }
};

}  // namespace

uint64_t hash_bytes(const char* bytes, size_t count) {
  Hash hash;
  hash.add(bytes, count);
  return hash.value();
}

Sample::Sample(const Region& region) {
  const Runs runs(region);
  const char* start = reinterpret_cast<const char*>(region.address);
  const int64_t total = runs.bytes * runs.count;
  if (start == nullptr || total <= 0) return;
  if (total <= kPlaces * kLine) {
    for (int64_t i = 0; i < runs.count; ++i) spans_.push_back({start + runs.offset(i), runs.bytes});
    return;
  }
  const int64_t length = std::min(runs.bytes, kLine);
  const int64_t neighbours = (kLine + length - 1) / length;  // where runs are shorter than a line
  for (int64_t place = 0; place < kPlaces; ++place) {
    // Anywhere in the line's share of the region, so that columns differ as well as rows.
    const double within = static_cast<double>((place + 1) * kOdd >> 32) / 4294967296.0;
    const double share = static_cast<double>(total) / kPlaces;
    const int64_t at = static_cast<int64_t>(share * (static_cast<double>(place) + within));
    const int64_t first = std::min(at / runs.bytes, runs.count - neighbours);
    for (int64_t i = first; i < first + neighbours; ++i) {
      const char* run = start + runs.offset(i);
      const int64_t column = at % runs.bytes;
      const int64_t misaligned =
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(run + column)) % kLine;
      const int64_t from = std::clamp<int64_t>(column - misaligned, 0, runs.bytes - length);
      spans_.push_back({run + from, length});
    }
  }
}

uint64_t Sample::hash() const {
  Hash hash;
  for (const Span& span : spans_) hash.add(span.data, static_cast<size_t>(span.bytes));
  return hash.value();
}

int64_t Sample::bytes() const {
  return std::accumulate(spans_.begin(), spans_.end(), int64_t{0},
                         [](int64_t sum, const Span& span) { return sum + span.bytes; });
}

}  // namespace qfx::python
