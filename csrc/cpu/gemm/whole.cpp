#include "cpu/gemm/whole.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "cpu/core/checksum.h"
#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

struct Weight {
  const int8_t* data = nullptr;
  uint64_t contents = 0;

  bool operator==(const Weight&) const = default;
};

// 64 - bits of an address that is spread over all of them.
size_t hash_of(const int8_t* data, int bits) {
  return reinterpret_cast<uintptr_t>(data) * 0x9e3779b97f4a7c15u >> (64 - bits);
}

// The weights that were read, in memory that does not grow: one that had to make room is read
// again.
class Known {
 public:
  bool has(const Weight& weight) {
    const std::lock_guard lock(mutex_);
    const Weight* const ways = ways_of(weight);
    return std::find(ways, ways + kWays, weight) != ways + kWays;
  }

  void add(const Weight& weight) {
    const std::lock_guard lock(mutex_);
    Weight* const ways = ways_of(weight);
    const auto same = [&](const Weight& w) { return w.data == weight.data || w.data == nullptr; };
    Weight* const found = std::find_if(ways, ways + kWays, same);
    (found == ways + kWays ? ways[next_++ % kWays] : *found) = weight;
  }

 private:
  static constexpr int kBits = 10, kWays = 8;

  Weight* ways_of(const Weight& weight) { return weights_[hash_of(weight.data, kBits)]; }

  std::mutex mutex_;
  Weight weights_[1 << kBits][kWays];
  unsigned next_ = 0;
};

Known known;

// What a thread used last, so that its calls take no lock.
Weight& recent(const int8_t* data) {
  constexpr int kBits = 8;
  thread_local Weight weights[1 << kBits];
  return weights[hash_of(data, kBits)];
}

}  // namespace

std::string fault_of_contents(const int8_t* data, int64_t size, uint64_t contents) {
  constexpr int64_t kHeader = 64, kStepsPerRow = 32, kPart = 1 << 13;  // rows
  const int64_t rows = (size - kHeader) / kChecked;
  std::atomic<uint64_t> sum = 0;
  parallel((rows + kPart - 1) / kPart, rows * kStepsPerRow, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPart, last = std::min(end * kPart, rows);
    sum += checksum(data + kHeader + kChecked * first, last - first, first);
  });
  return sum == contents ? "" : "it is damaged: its contents are not those that were packed";
}

std::string fault_at_first_use(const int8_t* data, int64_t size, uint64_t contents) {
  const Weight weight = {data, contents};
  Weight& last = recent(data);
  if (last == weight) return "";
  if (!known.has(weight)) {
    const std::string fault = fault_of_contents(data, size, contents);
    if (!fault.empty()) return fault;
    known.add(weight);
  }
  last = weight;
  return "";
}

void know_whole(const int8_t* data, uint64_t contents) { recent(data) = {data, contents}; }

}  // namespace qfx::cpu
