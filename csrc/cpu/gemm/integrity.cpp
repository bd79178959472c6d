#include "cpu/gemm/integrity.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "cpu/core/checksum.h"
#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

struct Place {
  const int8_t* data = nullptr;
  uint64_t contents = 0;
  uint32_t generation = 0;  // of its address

  bool operator==(const Place&) const = default;
};

// 64 - bits of an address that is spread over all of them.
size_t hash_of(const int8_t* data, int bits) {
  return reinterpret_cast<uintptr_t>(data) * 0x9e3779b97f4a7c15u >> (64 - bits);
}

// How often what was known of an address, and of those that share its number, was forgotten.
constexpr int kGenerationBits = 10;
std::atomic<uint32_t> generations[1 << kGenerationBits];

std::atomic<uint32_t>& generation_of(const void* data) {
  return generations[hash_of(static_cast<const int8_t*>(data), kGenerationBits)];
}

Place weight_at(const int8_t* data, uint64_t contents) {
  return {data, contents, generation_of(data).load(std::memory_order_relaxed)};
}

// The weights that were read, in memory that does not grow: one that had to make room is read
// again.
class Known {
 public:
  bool has(const Place& weight) {
    const std::lock_guard lock(mutex_);
    const Place* const ways = ways_of(weight);
    return std::find(ways, ways + kWays, weight) != ways + kWays;
  }

  void add(const Place& weight) {
    const std::lock_guard lock(mutex_);
    Place* const ways = ways_of(weight);
    const auto same = [&](const Place& w) { return w.data == weight.data || w.data == nullptr; };
    Place* const found = std::find_if(ways, ways + kWays, same);
    (found == ways + kWays ? ways[next_++ % kWays] : *found) = weight;
  }

 private:
  static constexpr int kBits = 10, kWays = 8;

  Place* ways_of(const Place& weight) { return weights_[hash_of(weight.data, kBits)]; }

  std::mutex mutex_;
  Place weights_[1 << kBits][kWays];
  unsigned next_ = 0;
};

Known known;

// What a thread used last, so that its calls take no lock.
Place& recent(const int8_t* data) {
  constexpr int kBits = 8;
  thread_local Place weights[1 << kBits];
  return weights[hash_of(data, kBits)];
}

}  // namespace

std::string fault_of_contents(const int8_t* data, int64_t size, const Contents& contents) {
  constexpr int64_t kStepsPerRow = 32, kPart = 1 << 13;  // rows
  const int64_t rows = (size - contents.header) / kChecked;
  std::atomic<uint64_t> sum = 0;
  parallel((rows + kPart - 1) / kPart, rows * kStepsPerRow, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPart, last = std::min(end * kPart, rows);
    sum += checksum(data + contents.header + kChecked * first, last - first, first);
  });
  return sum == contents.sum ? "" : "it is damaged: its contents are not those that were packed";
}

std::string fault_at_first_use(const int8_t* data, int64_t size, const Contents& contents) {
  const Place weight = weight_at(data, contents.sum);  // before it is read
  Place& last = recent(data);
  if (last == weight) return "";
  if (!known.has(weight)) {
    const std::string fault = fault_of_contents(data, size, contents);
    if (!fault.empty()) return fault;
    known.add(weight);
  }
  last = weight;
  return "";
}

void know_whole(const int8_t* data, uint64_t contents) { recent(data) = weight_at(data, contents); }

void forget_whole(const void* data) { ++generation_of(data); }

void forget_whole() {
  for (std::atomic<uint32_t>& generation : generations) ++generation;
}

}  // namespace qfx::cpu
