#include "fibers.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace qfx::emulated {
namespace {

constexpr size_t kStack = 256 << 10, kPage = 4096, kSharedArea = 256 << 10;
constexpr int kBarriers = 16;

char* map_guarded(size_t bytes) {  // a page that faults on either side
  void* area = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) throw Fault("no memory for the emulator");
  char* inner = static_cast<char*>(area) + kPage;
  if (mprotect(inner, bytes, PROT_READ | PROT_WRITE) != 0) throw Fault("mprotect failed");
  return inner;
}

enum class State { kReady, kWaiting, kPolling, kDone };

struct Fiber {
  char* stack = map_guarded(kStack);
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  State state = State::kDone;
  unsigned index = 0;
  Place place = {};
  std::string waits;           // for what
  std::function<bool()> done;  // of kPolling
  void* fake_stack = nullptr;  // of the address sanitizer
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

// --- state of the one grid that runs ---

std::mutex launching;
uint64_t random_state = 0x9e3779b97f4a7c15;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Fiber*> ready, polling;
Fiber* running = nullptr;
int alive = 0;
Barrier barriers[kBarriers];
std::vector<std::map<uint32_t, Meeting>> warps;  // meetings by mask
std::vector<std::function<void()>> deferred;
std::exception_ptr failure;
const std::function<void()>* body = nullptr;
Size3 block_now, block_size, grid_size;
size_t shared_bytes_now = 0;
std::vector<std::function<void()>> resets;
jmp_buf scheduler;

char* shared_area() {
  static char* area = map_guarded(kSharedArea);
  return area;
}

// --- switching ---

#if defined(__SANITIZE_ADDRESS__)
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
void before_fiber(Fiber& f) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, f.stack, kStack);
}
void in_scheduler() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
void in_fiber(Fiber& f) {
  __sanitizer_finish_switch_fiber(f.fake_stack, &scheduler_stack, &scheduler_stack_size);
}
void before_scheduler(Fiber& f) {
  __sanitizer_start_switch_fiber(&f.fake_stack, scheduler_stack, scheduler_stack_size);
}
#else
void before_fiber(Fiber&) {}
void in_scheduler() {}
void in_fiber(Fiber&) {}
void before_scheduler(Fiber&) {}
#endif

void to_scheduler() {
  Fiber& self = *running;
  before_scheduler(self);
  if (_setjmp(self.at) == 0) _longjmp(scheduler, 1);
  in_fiber(self);
}

void thread_ended();

// A fiber lives on from block to block: to make one is a system call.
void fiber_main() {
  in_fiber(*running);
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
  before_fiber(f);
  if (_setjmp(scheduler) == 0) {
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    setcontext(&f.start);
  }
  in_scheduler();
  running = nullptr;
}

void prepare(Fiber& f) {  // at its first line again, wherever a failed block has left it
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack;
  f.start.uc_stack.ss_size = kStack;
  f.start.uc_link = nullptr;
  makecontext(&f.start, fiber_main, 0);
  f.started = false;
  f.fake_stack = nullptr;
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

void release_if_complete(Barrier& b) {
  const int needed = b.count == 0 ? alive : b.count;
  if (b.arrived == 0 || b.arrived < needed) return;
  for (Fiber* f : b.waiting) make_ready(f);
  b = Barrier{};
}

void thread_ended() {
  running->state = State::kDone;
  --alive;
  if (barriers[0].count == 0) release_if_complete(barriers[0]);
}

void arrive(int id, int count) {
  if (id < 0 || id >= kBarriers) fault("barrier " + std::to_string(id) + " is outside 0..15");
  Barrier& b = barriers[id];
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
  const std::function<void()> action = std::move(deferred[i]);
  deferred.erase(deferred.begin() + static_cast<ptrdiff_t>(i));
  action();
}

bool poll(size_t i) {
  Fiber* f = polling[i];
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

Fault deadlock() {
  std::map<std::string, std::vector<unsigned>> waiting;
  for (const auto& f : fibers) {
    if (f->state == State::kWaiting || f->state == State::kPolling)
      waiting[f->waits].push_back(f->index);
  }
  std::string text = "deadlock in block " + text_of(block_now) + ":";
  for (const auto& [what, threads] : waiting) {
    text += (text.back() == ':' ? "" : ";");
    text += " threads " + ranges_of(threads) + " wait for " + what;
  }
  return Fault(text);
}

void run_threads() {
  while (alive > 0) {
    if (!deferred.empty() && random_below(16) == 0) deliver_one();
    if (!polling.empty() && random_below(8) == 0) {
      poll(random_below(static_cast<uint32_t>(polling.size())));
    }
    if (!ready.empty()) {
      resume(*take_ready());
      if (failure) std::rethrow_exception(failure);
    } else if (!poll_all()) {
      if (deferred.empty()) throw deadlock();
      deliver_one();
    }
  }
}

// --- blocks ---

void poison_shared() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(shared_area(), kSharedArea);
#endif
  std::memset(shared_area(), kPoison, std::min(kSharedArea, shared_bytes_now + kPage));
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(shared_area() + shared_bytes_now, kSharedArea - shared_bytes_now);
#endif
}

void check_shared() {
#if defined(__SANITIZE_ADDRESS__)
  return;  // which has already seen it
#endif
  const char* end = shared_area() + std::min(kSharedArea, shared_bytes_now + kPage);
  for (const char* p = shared_area() + shared_bytes_now; p < end; ++p) {
    if (static_cast<unsigned char>(*p) == kPoison) continue;
    throw Fault("block " + text_of(block_now) + " wrote to byte " +
                std::to_string(p - shared_area()) + " of its " + std::to_string(shared_bytes_now) +
                " bytes of dynamic shared memory");
  }
}

void reset_block() {
  ready.clear();
  polling.clear();
  deferred.clear();
  failure = nullptr;
  for (Barrier& b : barriers) b = Barrier{};
  for (auto& warp : warps) warp.clear();
}

void run_block(Size3 where, unsigned threads) {
  block_now = where;
  reset_block();
  poison_shared();
  for (const auto& reset : resets) reset();
  alive = static_cast<int>(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = *fibers[i];
    f.index = i;
    const unsigned plane = block_size.x * block_size.y;
    f.place = {
        {i % block_size.x, i % plane / block_size.x, i / plane}, where, block_size, grid_size};
    make_ready(&f);
  }
  run_threads();
  if (!deferred.empty()) {
    throw Fault("block " + text_of(where) + " ended before " + std::to_string(deferred.size()) +
                " of its asynchronous copies");
  }
  check_shared();
}

void check_limits(unsigned threads) {
  if (threads == 0 || threads > 1024 || block_size.z > 64)
    throw Fault("a block of " + std::to_string(threads) + " threads, CUDA has 1 to 1024");
  if (grid_size.x == 0 || grid_size.y == 0 || grid_size.z == 0 || grid_size.x > 0x7fffffffu ||
      grid_size.y > 65535 || grid_size.z > 65535)
    throw Fault("a grid of " + text_of(grid_size) +
                " blocks, CUDA has 1 to (2147483647, 65535, 65535)");
  if (shared_bytes_now > kMaxShared)
    throw Fault(std::to_string(shared_bytes_now) + " bytes of dynamic shared memory, a block has " +
                std::to_string(kMaxShared) + " at most");
}

// What a failed block has left behind in the middle of its work must not go on.
struct Forget {
  unsigned threads;
  ~Forget() {
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i]->state != State::kDone) prepare(*fibers[i]);
      fibers[i]->state = State::kDone;
      fibers[i]->done = nullptr;
    }
    reset_block();
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

void run_grid(Size3 grid, Size3 block, size_t shared_bytes, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(launching);
  const unsigned threads = block.x * block.y * block.z;
  grid_size = grid;
  block_size = block;
  shared_bytes_now = shared_bytes;
  body = &thread;
  check_limits(threads);
  while (fibers.size() < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    prepare(*fibers.back());
  }
  warps.resize((threads + kWarp - 1) / kWarp);
  const Forget forget{threads};
  std::vector<uint64_t> order(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
  }
  for (uint64_t i : order) {
    const uint64_t plane = uint64_t{grid.x} * grid.y;
    run_block({static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i % plane / grid.x),
               static_cast<unsigned>(i / plane)},
              threads);
  }
}

const Place& place() { return running->place; }
unsigned thread_index() { return running->index; }

void fault(const std::string& sentence) {
  std::string where;
  if (running != nullptr) {
    where = "block " + text_of(block_now) + " thread " + std::to_string(running->index) + ": ";
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

void defer(std::function<void()> action) { deferred.push_back(std::move(action)); }

void sync_block() {
  Barrier& b = barriers[0];
  if (b.arrived > 0 && b.count != 0)
    fault("__syncthreads while others wait at barrier 0 for " + std::to_string(b.count) +
          " threads");
  ++b.arrived;
  b.waiting.push_back(running);
  running->state = State::kWaiting;
  running->waits = "__syncthreads";
  release_if_complete(b);
  to_scheduler();
}

void barrier_sync(int id, int count) {
  arrive(id, count);
  barriers[id].waiting.push_back(running);
  running->state = State::kWaiting;
  running->waits = "barrier " + std::to_string(id) + " of " + std::to_string(count) + " threads";
  release_if_complete(barriers[id]);
  to_scheduler();
}

void barrier_arrive(int id, int count) {
  arrive(id, count);
  release_if_complete(barriers[id]);
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
  Meeting& m = warps[running->index / kWarp][mask];
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

void* dynamic_shared_memory() { return shared_area(); }
size_t dynamic_shared_bytes() { return shared_bytes_now; }

void at_block_start(const std::function<void()>& reset) {
  resets.push_back(reset);
  reset();
}

}  // namespace qfx::emulated
