#include "fibers.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "context.h"

namespace qfx::emulated {
namespace {

constexpr size_t kSharedArea = 256 << 10;
constexpr size_t kBehind = 4096;  // bytes behind a block's shared memory that are watched
constexpr int kBarriers = 16;

enum class State { kReady, kWaiting, kPolling, kDone };

struct Block;

struct Fiber {
  Context context;
  State state = State::kDone;
  Block* block = nullptr;
  unsigned index = 0;  // in the block
  Place place = {};
  std::string waits;           // for what
  std::function<bool()> done;  // of kPolling
};

struct Barrier {
  int arrived = 0, count = 0;  // count 0: all threads that have not ended
  std::vector<Fiber*> waiting;
};

struct Meeting {
  uint32_t arrived = 0;
  const char* what = nullptr;
  void* lanes[kWarp] = {};
  Fiber* waiting[kWarp] = {};
};

struct Block {
  Size3 where = {};
  unsigned number = 0;  // in the cluster
  int alive = 0;        // threads
  Barrier barriers[kBarriers];
  std::vector<std::map<uint32_t, Meeting>> warps;  // meetings by mask
  char* shared = map_guarded(kSharedArea);
};

struct Deferred {
  Block* block;
  std::function<void()> action;
};

// --- state of the one grid that runs ---

std::mutex launching;
uint64_t random_state = 0x9e3779b97f4a7c15;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Fiber*> ready, polling;
std::vector<Block*> late;  // of the cluster, that have not begun
Fiber* running = nullptr;
std::vector<std::unique_ptr<Block>> blocks;  // of the cluster, the first cluster_size
Block* now = nullptr;                        // the one that runs
int alive = 0;                               // threads of all of them
Barrier cluster_barrier;
std::vector<Deferred> deferred;
std::exception_ptr failure;
const std::function<void()>* body = nullptr;
Size3 block_size, grid_size;
unsigned cluster_size = 1;
size_t shared_bytes_now = 0;
std::vector<std::function<void(unsigned)>> resets;

// --- switching ---

void to_scheduler() { suspend(running->context); }

void thread_ended();

// A fiber lives on from block to block: to make one is a system call.
void fiber_main() {
  entered(running->context);
  for (;;) {
    try {
      (*body)();
    } catch (...) {
      failure = std::current_exception();
    }
    thread_ended();
    to_scheduler();
  }
}

void resume(Fiber& f) {
  running = &f;
  now = f.block;
  resume(f.context);
  running = nullptr;
}

// --- waiting ---

void make_ready(Fiber* f) {
  f->state = State::kReady;
  ready.push_back(f);
}

void wait_for(const std::string& what) {
  running->state = State::kWaiting;
  running->waits = what;
  to_scheduler();
}

void release_if_complete(Barrier& b, int threads) {
  const int needed = b.count == 0 ? threads : b.count;
  if (b.arrived == 0 || b.arrived < needed) return;
  for (Fiber* f : b.waiting) make_ready(f);
  b = Barrier{};
}

void thread_ended() {
  running->state = State::kDone;
  --alive;
  --now->alive;
  if (now->barriers[0].count == 0) release_if_complete(now->barriers[0], now->alive);
  release_if_complete(cluster_barrier, alive);
}

// All threads of which `threads` have not ended.
void wait_for_all(Barrier& b, int threads, const std::string& what) {
  ++b.arrived;
  b.waiting.push_back(running);
  running->state = State::kWaiting;
  running->waits = what;
  release_if_complete(b, threads);
  to_scheduler();
}

void arrive(int id, int count) {
  if (id < 0 || id >= kBarriers) fault("barrier " + std::to_string(id) + " is outside 0..15");
  Barrier& b = now->barriers[id];
  if (count % kWarp != 0)
    fault("barrier " + std::to_string(id) + " for " + std::to_string(count) +
          " threads, expected a multiple of 32");
  if (b.arrived > 0 && b.count != count)
    fault("barrier " + std::to_string(id) + " for " + std::to_string(count) +
          " threads, while others wait there for " + std::to_string(b.count));
  b.count = count;
  ++b.arrived;
}

// --- scheduling ---

void deliver_one() {
  const size_t i = random_below(static_cast<uint32_t>(deferred.size()));
  const Deferred next = std::move(deferred[i]);
  deferred.erase(deferred.begin() + static_cast<ptrdiff_t>(i));
  in_block(next.block->number, next.action);
}

bool poll(size_t i) {
  Fiber* f = polling[i];
  now = f->block;
  if (!f->done()) return false;
  polling[i] = polling.back();
  polling.pop_back();
  f->done = nullptr;
  make_ready(f);
  return true;
}

bool poll_all() {
  bool any = false;
  for (size_t i = polling.size(); i-- > 0;) any |= poll(i);
  return any;
}

Fiber* take_ready() {
  const size_t i = random_below(static_cast<uint32_t>(ready.size()));
  Fiber* f = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  return f;
}

std::string text_of(Size3 s) {
  return "(" + std::to_string(s.x) + ", " + std::to_string(s.y) + ", " + std::to_string(s.z) + ")";
}

// "0-31, 40"
std::string ranges_of(const std::vector<unsigned>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (end > i + 1) text += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

std::string name_of(const Block& b) { return "block " + text_of(b.where); }

// "block (0, 0, 0): threads 0-31 wait for this; threads 32-63 wait for that", empty if nobody
// waits.
std::string waiting_in(const Block& block) {
  std::map<std::string, std::vector<unsigned>> waiting;
  for (const auto& f : fibers) {
    if (f->block == &block && (f->state == State::kWaiting || f->state == State::kPolling))
      waiting[f->waits].push_back(f->index);
  }
  if (waiting.empty()) return "";
  std::string text = name_of(block) + ":";
  for (const auto& [what, threads] : waiting) {
    text += (text.back() == ':' ? "" : ";");
    text += " threads " + ranges_of(threads) + " wait for " + what;
  }
  return text;
}

Fault deadlock() {
  std::string text;
  for (const auto& block : blocks) {
    const std::string waiting = waiting_in(*block);
    if (!waiting.empty()) text += (text.empty() ? "deadlock in " : "; in ") + waiting;
  }
  return Fault(text);
}

Fiber* fiber_of(const Block& b, unsigned i) {
  return fibers[b.number * block_size.x * block_size.y * block_size.z + i].get();
}

void begin_late() {
  Block& b = *late.back();
  late.pop_back();
  for (int i = 0; i < b.alive; ++i) make_ready(fiber_of(b, static_cast<unsigned>(i)));
}

void run_threads() {
  while (alive > 0) {
    if (!late.empty() && random_below(1024) == 0) begin_late();
    if (!deferred.empty() && random_below(16) == 0) deliver_one();
    if (!polling.empty() && random_below(8) == 0) {
      poll(random_below(static_cast<uint32_t>(polling.size())));
    }
    if (!ready.empty()) {
      resume(*take_ready());
      if (failure) std::rethrow_exception(failure);
    } else if (!poll_all()) {
      if (!late.empty()) {
        begin_late();
      } else if (!deferred.empty()) {
        deliver_one();
      } else {
        throw deadlock();
      }
    }
  }
}

// --- blocks ---

void poison_shared(Block& b) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(b.shared, kSharedArea);
#endif
  std::memset(b.shared, kPoison, std::min(kSharedArea, shared_bytes_now + kBehind));
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(b.shared + shared_bytes_now, kSharedArea - shared_bytes_now);
#endif
}

void check_shared(const Block& b) {
#if defined(__SANITIZE_ADDRESS__)
  return;  // which has already seen it
#endif
  const char* end = b.shared + std::min(kSharedArea, shared_bytes_now + kBehind);
  for (const char* p = b.shared + shared_bytes_now; p < end; ++p) {
    if (static_cast<unsigned char>(*p) == kPoison) continue;
    throw Fault(name_of(b) + " wrote to byte " + std::to_string(p - b.shared) + " of its " +
                std::to_string(shared_bytes_now) + " bytes of dynamic shared memory");
  }
}

void reset_cluster() {
  ready.clear();
  polling.clear();
  late.clear();
  deferred.clear();
  failure = nullptr;
  cluster_barrier = Barrier{};
  for (const auto& block : blocks) {
    for (Barrier& b : block->barriers) b = Barrier{};
    for (auto& warp : block->warps) warp.clear();
  }
}

void prepare_block(Block& b, Size3 where, unsigned threads) {
  b.where = where;
  b.alive = static_cast<int>(threads);
  poison_shared(b);
  for (const auto& reset : resets) reset(b.number);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = *fiber_of(b, i);
    f.block = &b;
    f.index = i;
    const unsigned plane = block_size.x * block_size.y;
    f.place = {
        {i % block_size.x, i % plane / block_size.x, i / plane}, where, block_size, grid_size};
  }
  late.push_back(&b);
}

void run_cluster(Size3 first, unsigned threads) {
  reset_cluster();
  alive = static_cast<int>(cluster_size * threads);
  for (unsigned i = 0; i < cluster_size; ++i) {
    prepare_block(*blocks[i], {first.x + i, first.y, first.z}, threads);
  }
  // One block begins at once, the others now or later.
  if (cluster_size > 1) std::swap(late.back(), late[random_below(cluster_size)]);
  begin_late();
  while (!late.empty() && random_below(2) == 0) begin_late();
  run_threads();
  if (!deferred.empty()) {
    throw Fault(name_of(*deferred[0].block) + " ended before " + std::to_string(deferred.size()) +
                " of its asynchronous copies");
  }
  for (unsigned i = 0; i < cluster_size; ++i) check_shared(*blocks[i]);
}

void check_limits(unsigned threads) {
  if (threads == 0 || threads > 1024 || block_size.z > 64)
    throw Fault("a block of " + std::to_string(threads) + " threads, CUDA has 1 to 1024");
  if (grid_size.x == 0 || grid_size.y == 0 || grid_size.z == 0 || grid_size.x > 0x7fffffffu ||
      grid_size.y > 65535 || grid_size.z > 65535)
    throw Fault("a grid of " + text_of(grid_size) +
                " blocks, CUDA has 1 to (2147483647, 65535, 65535)");
  if (cluster_size == 0 || cluster_size > kMaxCluster || grid_size.x % cluster_size != 0)
    throw Fault("clusters of " + std::to_string(cluster_size) + " blocks in a grid of " +
                text_of(grid_size) + ", CUDA has 1 to 8 and no rest");
  if (shared_bytes_now > kMaxShared)
    throw Fault(std::to_string(shared_bytes_now) + " bytes of dynamic shared memory, a block has " +
                std::to_string(kMaxShared) + " at most");
}

// Room for the blocks of a cluster and their threads.
void make_room(unsigned threads) {
  while (fibers.size() < cluster_size * threads) {
    fibers.push_back(std::make_unique<Fiber>());
    prepare(fibers.back()->context, fiber_main);
  }
  while (blocks.size() < cluster_size) {
    blocks.push_back(std::make_unique<Block>());
    blocks.back()->number = static_cast<unsigned>(blocks.size()) - 1;
  }
  for (const auto& block : blocks) block->warps.resize((threads + kWarp - 1) / kWarp);
}

// What a failed block has left behind in the middle of its work must not go on.
struct Forget {
  unsigned threads;
  ~Forget() {
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i]->state != State::kDone) prepare(fibers[i]->context, fiber_main);
      fibers[i]->state = State::kDone;
      fibers[i]->done = nullptr;
    }
    reset_cluster();
  }
};

}  // namespace

void set_seed(uint64_t seed) { random_state = (seed + 1) * 0x9e3779b97f4a7c15; }

uint32_t random_below(uint32_t limit) {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  const uint64_t bits = (random_state * 0x2545f4914f6cdd1d) >> 32;
  return static_cast<uint32_t>(bits * limit >> 32);
}

void run_grid(Size3 grid, Size3 block, size_t shared_bytes, const std::function<void()>& thread,
              unsigned cluster) {
  const std::lock_guard<std::mutex> lock(launching);
  const unsigned threads = block.x * block.y * block.z;
  grid_size = grid;
  block_size = block;
  cluster_size = cluster;
  shared_bytes_now = shared_bytes;
  body = &thread;
  check_limits(threads);
  make_room(threads);
  const Forget forget{cluster * threads};
  const unsigned across = grid.x / cluster;
  std::vector<uint64_t> order(uint64_t{across} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
  }
  for (uint64_t i : order) {
    const uint64_t plane = uint64_t{across} * grid.y;
    run_cluster({static_cast<unsigned>(i % across) * cluster,
                 static_cast<unsigned>(i % plane / across), static_cast<unsigned>(i / plane)},
                threads);
  }
}

const Place& place() { return running->place; }
unsigned thread_index() { return running->index; }
unsigned block_in_cluster() { return now->number; }
std::string block_name() { return name_of(*now); }

void fault(const std::string& sentence) {
  std::string where;
  if (running != nullptr) {
    where = name_of(*running->block) + " thread " + std::to_string(running->index) + ": ";
  }
  throw Fault(where + sentence);
}

void perhaps_yield() {
  if (random_below(4) != 0) return;
  make_ready(running);
  to_scheduler();
}

void wait_until(const std::function<bool()>& done, const std::string& what) {
  if (done()) return perhaps_yield();
  running->state = State::kPolling;
  running->waits = what;
  running->done = done;
  polling.push_back(running);
  to_scheduler();
}

void in_block(unsigned block, const std::function<void()>& f) {
  if (block >= cluster_size)
    fault("block " + std::to_string(block) + " of a cluster of " + std::to_string(cluster_size));
  Block* const before = std::exchange(now, blocks[block].get());
  if (now->alive == 0) fault("an access to " + name_of(*now) + ", which has exited");
  f();
  now = before;
}

void defer(std::function<void()> action) { deferred.push_back({now, std::move(action)}); }

void sync_block() {
  Barrier& b = now->barriers[0];
  if (b.arrived > 0 && b.count != 0)
    fault("__syncthreads while others wait at barrier 0 for " + std::to_string(b.count) +
          " threads");
  wait_for_all(b, now->alive, "__syncthreads");
}

void sync_cluster() { wait_for_all(cluster_barrier, alive, "the cluster"); }

void barrier_sync(int id, int count) {
  arrive(id, count);
  now->barriers[id].waiting.push_back(running);
  running->state = State::kWaiting;
  running->waits = "barrier " + std::to_string(id) + " of " + std::to_string(count) + " threads";
  release_if_complete(now->barriers[id], now->alive);
  to_scheduler();
}

void barrier_arrive(int id, int count) {
  arrive(id, count);
  release_if_complete(now->barriers[id], now->alive);
  perhaps_yield();
}

void meet(const char* what, uint32_t mask, void* mine, void (*combine)(void* const*, uint32_t)) {
  const unsigned threads = block_size.x * block_size.y * block_size.z;
  const unsigned first = running->index - lane();
  const uint32_t there = threads - first >= kWarp ? ~0u : (1u << (threads - first)) - 1;
  if ((mask & ~there) != 0) {
    fault(std::string(what) + " with a mask of lanes that a block of " + std::to_string(threads) +
          " threads does not have");
  }
  if ((mask >> lane() & 1) == 0) fault(std::string(what) + " without the own lane in the mask");
  Meeting& m = now->warps[running->index / kWarp][mask];
  if (m.arrived != 0 && std::strcmp(m.what, what) != 0)
    fault(std::string(what) + " while others of the warp wait for " + m.what);
  m.what = what;
  m.lanes[lane()] = mine;
  m.waiting[lane()] = running;
  m.arrived |= 1u << lane();
  if (m.arrived != mask) return wait_for(what);
  combine(m.lanes, mask);
  m.arrived = 0;
  for (int i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) != 0) make_ready(m.waiting[i]);
  }
  to_scheduler();
}

void* dynamic_shared_memory() { return now->shared; }
size_t dynamic_shared_bytes() { return shared_bytes_now; }

void at_block_start(const std::function<void(unsigned)>& reset) {
  resets.push_back(reset);
  for (unsigned block = 0; block < kMaxCluster; ++block) reset(block);
}

}  // namespace qfx::emulated
