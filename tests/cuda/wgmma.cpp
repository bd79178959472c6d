#include "wgmma.h"

#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "copy_engine.h"
#include "fibers.h"

namespace qfx::emulated {
namespace {

constexpr int kWarps = 32, kWarpsOfGroup = 4, kRows = 16, kBytes = 32, kRegisters = 65536;

// The accumulators of a warp while they are not its own.
struct Accumulator {
  std::array<int32_t*, kWarp> d;
  std::vector<std::array<int32_t, kWarp>> values;  // by register
  int pending = 0;
};

struct Operation {
  Product product;
  int columns, warp;
  uint64_t left, right;
  bool accumulate;
  Accumulator* to;
  bool done = false;
};

struct WarpState {
  std::list<Accumulator> accumulators;
  std::deque<std::vector<Operation>> groups{{}};  // the last one is open
  bool fenced = false;
  size_t issued = 0;
};

struct State {
  std::array<WarpState, kWarps> warps;
  std::array<std::vector<std::pair<uint64_t, uint64_t>>, kWarps / kWarpsOfGroup> issued;
  std::map<unsigned, int> registers;  // by warpgroup, where it was set
};

State& state() {
  static State states[kMaxCluster];
  static const bool registered = (at_block_start([](unsigned b) { states[b] = State{}; }), true);
  (void)registered;
  return states[block_in_cluster()];
}

WarpState& warp_state() { return state().warps[thread_index() / kWarp]; }

// --- tiles ---

// 32 bytes of row `row` of a tile: K-major, 128-byte swizzle.
void read_row(uint64_t descriptor, int row, uint8_t* to) {
  const auto field = [&](int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  };
  const uint32_t start = field(0), stride = field(32);
  const uint32_t first =
      start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8) * 128;
  for (uint32_t k = 0; k < kBytes; k += 16) {
    std::memcpy(to + k, shared_bytes_at(swizzled(first + k), 16), 16);
  }
}

void check_descriptor(uint64_t descriptor) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fault("a wgmma descriptor whose swizzle is not that of 128 bytes");
  if ((descriptor >> 49 & 7) != 0) fault("a wgmma descriptor with a base offset");
  if ((descriptor >> 14 & 3) != 0 || (descriptor >> 30 & 3) != 0 || (descriptor >> 46 & 7) != 0 ||
      (descriptor >> 52 & 0x3ff) != 0)
    fault("a wgmma descriptor with bits that belong to no field");
  if (start % 1024 >= 128)
    fault("a wgmma tile at byte " + std::to_string(start) +
          " of shared memory; without a base offset the swizzle begins at a multiple of 1024");
}

// --- products ---

int32_t product_of(Product product, const uint8_t* a, const uint8_t* b) {
  uint32_t sum = 0;
  if (product == Product::kBytes) {
    for (int k = 0; k < kBytes; ++k) {
      sum += static_cast<uint32_t>(static_cast<int8_t>(a[k]) * static_cast<int8_t>(b[k]));
    }
  } else {
    uint64_t x[kBytes / 8], y[kBytes / 8];
    std::memcpy(x, a, kBytes);
    std::memcpy(y, b, kBytes);
    for (int i = 0; i < kBytes / 8; ++i) sum += static_cast<uint32_t>(std::popcount(x[i] & y[i]));
  }
  return static_cast<int32_t>(sum);
}

// Row 16 w + lane / 4 + 8 h and column 8 j + 2 (lane % 4) + e are d[4 j + 2 h + e] of the lane.
void execute(Operation& op) {
  if (std::exchange(op.done, true)) return;
  uint8_t left[kRows][kBytes], right[256][kBytes];
  for (int r = 0; r < kRows; ++r) {
    read_row(op.left, op.warp % kWarpsOfGroup * kRows + r, left[r]);
  }
  for (int c = 0; c < op.columns; ++c) read_row(op.right, c, right[c]);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < op.columns; ++c) {
      int32_t& d = op.to->values[static_cast<size_t>(c / 8 * 4 + r / 8 * 2 + c % 2)]
                                [static_cast<size_t>(r % 8 * 4 + c % 8 / 2)];
      const uint32_t before = op.accumulate ? static_cast<uint32_t>(d) : 0;
      d = static_cast<int32_t>(before +
                               static_cast<uint32_t>(product_of(op.product, left[r], right[c])));
    }
  }
}

void execute_all(WarpState& warp) {
  for (auto& group : warp.groups) {
    for (Operation& op : group) execute(op);
  }
}

// Gives d back to the threads once nothing is left to be written to it.
void finished(WarpState& warp, Operation& op) {
  execute(op);
  Accumulator& to = *op.to;
  if (--to.pending > 0) return;
  for (size_t i = 0; i < to.values.size(); ++i) {
    for (size_t lane = 0; lane < kWarp; ++lane) to.d[lane][i] = to.values[i][lane];
  }
  warp.accumulators.remove_if([&](const Accumulator& a) { return &a == &to; });
  warp.fenced = false;
}

// --- what the lanes bring ---

struct Issue {
  Product product;
  int columns;
  int32_t* d;
  uint64_t left, right;
  bool accumulate;
};

Accumulator* accumulator_of(WarpState& warp, void* const* lanes, const Issue& first) {
  for (Accumulator& a : warp.accumulators) {
    if (a.d[0] == first.d) return &a;
  }
  if (!warp.fenced) fault("a wgmma on registers that no wgmma.fence has handed over");
  Accumulator taken;
  taken.values.resize(static_cast<size_t>(first.columns) / 2);
  for (size_t lane = 0; lane < kWarp; ++lane) {
    taken.d[lane] = static_cast<Issue*>(lanes[lane])->d;
    for (size_t i = 0; i < taken.values.size(); ++i) taken.values[i][lane] = taken.d[lane][i];
    std::memset(taken.d[lane], kPoison, taken.values.size() * sizeof(int32_t));
  }
  warp.accumulators.push_back(std::move(taken));
  return &warp.accumulators.back();
}

// All warps of a warpgroup issue the same products.
void check_same(WarpState& warp, unsigned group, const Issue& issue) {
  auto& issued = state().issued[group];
  const std::pair<uint64_t, uint64_t> mine{issue.left, issue.right};
  if (warp.issued == issued.size()) issued.push_back(mine);
  if (issued[warp.issued++] != mine) fault("a wgmma whose descriptors differ within a warpgroup");
}

void issue(void* const* lanes, uint32_t) {
  const Issue& first = *static_cast<Issue*>(lanes[0]);
  for (int lane = 1; lane < kWarp; ++lane) {
    const Issue& other = *static_cast<Issue*>(lanes[lane]);
    if (other.left != first.left || other.right != first.right ||
        other.accumulate != first.accumulate)
      fault("a wgmma whose operands differ within a warp");
  }
  check_descriptor(first.left);
  check_descriptor(first.right);
  const unsigned index = thread_index() / kWarp;
  WarpState& warp = warp_state();
  check_same(warp, index / kWarpsOfGroup, first);
  Accumulator* to = accumulator_of(warp, lanes, first);
  ++to->pending;
  warp.groups.back().push_back({first.product, first.columns, static_cast<int>(index), first.left,
                                first.right, first.accumulate, to});
  if (random_below(8) == 0) execute_all(warp);
}

constexpr uint32_t kAll = ~0u;

}  // namespace

void wgmma_fence() {
  meet("wgmma.fence", kAll, nullptr, [](void* const*, uint32_t) { warp_state().fenced = true; });
}

void wgmma_commit() {
  meet("wgmma.commit_group", kAll, nullptr,
       [](void* const*, uint32_t) { warp_state().groups.emplace_back(); });
}

void wgmma_wait(int pending) {
  perhaps_yield();
  meet("wgmma.wait_group", kAll, &pending, [](void* const* lanes, uint32_t) {
    WarpState& warp = warp_state();
    const size_t left = static_cast<size_t>(*static_cast<int*>(lanes[0]));
    while (warp.groups.size() > left + 1) {
      for (Operation& op : warp.groups.front()) finished(warp, op);
      warp.groups.pop_front();
    }
  });
}

void wgmma(Product product, int columns, int32_t* d, uint64_t left, uint64_t right,
           bool accumulate) {
  Issue mine = {product, columns, d, left, right, accumulate};
  meet("wgmma.mma_async", kAll, &mine, issue);
}

void set_registers(int count, bool more) {
  if (count % 8 != 0 || count < 24 || count > 256)
    fault("setmaxnreg " + std::to_string(count) + ", expected a multiple of 8 in 24..256");
  const Size3 size = place().block_size;
  const unsigned threads = size.x * size.y * size.z;
  const int groups = static_cast<int>(threads / (kWarp * kWarpsOfGroup));
  const int at_first = kRegisters / static_cast<int>(threads) / 8 * 8;
  const unsigned group = thread_index() / (kWarp * kWarpsOfGroup);
  auto& set = state().registers;
  const auto fits = [=, &set] {
    int total = 0;
    for (int g = 0; g < groups; ++g) {
      const auto found = set.find(static_cast<unsigned>(g));
      const bool mine = static_cast<unsigned>(g) == group;
      total += mine ? count : found == set.end() ? at_first : found->second;
    }
    return total * kWarp * kWarpsOfGroup <= kRegisters;
  };
  if (more) wait_until(fits, std::to_string(count) + " registers for each of its threads");
  set[group] = count;
  meet("setmaxnreg", kAll, nullptr, [](void* const*, uint32_t) {});
}

}  // namespace qfx::emulated
