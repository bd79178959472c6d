// The execution model of CUDA on one thread of the host: the threads of a block are fibers, blocks
// run one after another, both in a seeded random order; blocks of a cluster run together, each with
// its own shared memory, and begin at different times. A fiber runs until it waits, so what a
// kernel leaves unordered happens in any order, and a missing barrier shows as a wrong result. A
// deadlock, a fault and a write beyond shared memory are errors that name block and threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace qfx::emulated {

struct Size3 {
  unsigned x, y, z;
};

// What a kernel did that CUDA forbids, as a sentence.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Place {
  Size3 thread, block, block_size, grid_size;
};

constexpr int kWarp = 32;
constexpr unsigned kMaxCluster = 8;       // blocks
constexpr size_t kMaxShared = 227 << 10;  // bytes of shared memory that a block may ask for
constexpr unsigned char kPoison = 0xcb;   // what memory holds that nobody has written

// --- from the host ---

void set_seed(uint64_t seed);
// `cluster` blocks that follow each other in x run together.
void run_grid(Size3 grid, Size3 block, size_t shared_bytes, const std::function<void()>& thread,
              unsigned cluster = 1);

// --- from a thread of a kernel ---

const Place& place();
unsigned thread_index();  // in the block
inline unsigned lane() { return thread_index() % kWarp; }
unsigned block_in_cluster();
std::string block_name();  // "block (1, 0, 0)"

[[noreturn]] void fault(const std::string& sentence);

// Lets the others run, sometimes: for places that have an effect which others see.
void perhaps_yield();

// Returns when done() is true; `what` names it where it never is.
void wait_until(const std::function<bool()>& done, const std::string& what);

// Calls f as if this were block `block` of the cluster, which must not have exited: what is asked
// of this interface, shared memory above all, is that block's.
void in_block(unsigned block, const std::function<void()>& f);

// An asynchronous effect in this block: happens at a random later time, at the latest when nobody
// can go on. It must come before the end of the block.
void defer(std::function<void()> action);

// A number below `limit`.
uint32_t random_below(uint32_t limit);

// All threads that have not ended meet, of the block or of the cluster.
void sync_block();
void sync_cluster();

// Barrier `id` for `count` threads: arrive and wait, or arrive alone.
void barrier_sync(int id, int count);
void barrier_arrive(int id, int count);

// The lanes of `mask` meet, each with `mine`; the last one calls combine(lanes, mask), in which
// lanes[i] is what lane i brought.
void meet(const char* what, uint32_t mask, void* mine, void (*combine)(void* const*, uint32_t));

void* dynamic_shared_memory();
size_t dynamic_shared_bytes();

// For what belongs to a block and lies elsewhere: called now for every block that a cluster may
// have, and at the beginning of each with its number in the cluster.
void at_block_start(const std::function<void(unsigned block)>& reset);

}  // namespace qfx::emulated
