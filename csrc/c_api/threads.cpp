// A pool of threads: each waits for a share of its own, first by looking, then asleep.
#include "c_api/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/core/parts.h"
#include "cpu/core/threads.h"

namespace qfx {
namespace {

std::atomic<int64_t> chosen = 0;  // 0: nobody has chosen a number yet

thread_local bool in_part = false;  // this thread runs a part of something

struct Job {
  void (*f)(void*, int64_t, int64_t) = nullptr;
  void* context = nullptr;
  int64_t count = 0, parts = 0;

  void run(int64_t part) const {
    in_part = true;
    f(context, count * part / parts, count * (part + 1) / parts);
    in_part = false;
  }
};

class Pool {
 public:
  // False, and nothing has run, if another thread is using the pool.
  bool run(Job job) {
    if (in_use_.test_and_set(std::memory_order_acquire)) return false;
    job.parts = std::min(job.parts, grown_to(job.parts - 1) + 1);
    job_ = job;
    left_.store(job.parts - 1, std::memory_order_relaxed);
    for (int64_t i = 0; i + 1 < job.parts; ++i) workers_[i]->wake();
    job.run(0);
    cpu::wait_until([&] { return left_.load(std::memory_order_acquire) == 0; });
    in_use_.clear(std::memory_order_release);
    return true;
  }

 private:
  // On a line of its own, so that a worker that looks disturbs no other.
  struct alignas(64) Worker {
    std::atomic<uint32_t> shares = 0;

    void wake() {
      shares.fetch_add(1, std::memory_order_release);
      shares.notify_one();
    }

    // Until it gets another share than the `seen` ones.
    void wait(uint32_t seen) const {
      constexpr int kLooks = 2000;  // some tens of microseconds, longer than between instructions
      for (int i = 0; i < kLooks; ++i) {
        if (shares.load(std::memory_order_acquire) != seen) return;
        cpu::relax();
      }
      shares.wait(seen, std::memory_order_acquire);
    }
  };

  // How many workers there are, after starting those that are missing.
  int64_t grown_to(int64_t count) {
    try {
      workers_.reserve(static_cast<size_t>(std::max<int64_t>(count, 0)));
      for (auto i = static_cast<int64_t>(workers_.size()); i < count; ++i) {
        auto made = std::make_unique<Worker>();
        std::thread([this, i, own = made.get()] { work(*own, i + 1); }).detach();
        workers_.push_back(std::move(made));
      }
    } catch (const std::exception&) {  // the system has no more threads: fewer do the work
    }
    return static_cast<int64_t>(workers_.size());
  }

  void work(const Worker& own, int64_t part) {
    for (uint32_t seen = 0;; ++seen) {
      own.wait(seen);
      job_.run(part);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::atomic_flag in_use_ = ATOMIC_FLAG_INIT;
  Job job_;
  std::vector<std::unique_ptr<Worker>> workers_;
  alignas(64) std::atomic<int64_t> left_ = 0;  // workers that have not finished
};

std::atomic<Pool*> pool = nullptr;

// Never freed, since its threads live as long as the process. A fork has none of them, so it gets
// another pool.
Pool& this_process() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });
  (void)registered;
  Pool* found = pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<Pool>();
  if (pool.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;
}

void check(int64_t count, const char* what, const std::string& shown) {
  if (count >= 1 && count <= kMostThreads) return;
  throw std::invalid_argument(std::string(what) + "=" + shown + ": expected a number of threads " +
                              "from 1 to " + std::to_string(kMostThreads));
}

int64_t first_choice() {
  const char* text = std::getenv("QFX_NUM_THREADS");
  if (text == nullptr) {
    return std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, kMostThreads);
  }
  int64_t count = 0;
  const char* end = text + std::strlen(text);
  if (std::from_chars(text, end, count).ptr != end) count = 0;
  check(count, "QFX_NUM_THREADS", text);
  return count;
}

}  // namespace

void set_threads(int64_t count) {
  check(count, "qfx_set_threads: count", std::to_string(count));
  chosen = count;
}

namespace cpu {

int64_t thread_count() {
  int64_t count = chosen.load(std::memory_order_relaxed);
  if (count > 0) return count;
  const int64_t first = first_choice();
  return chosen.compare_exchange_strong(count, first) ? first : count;
}

void run_parallel(int64_t count, int64_t grain, void (*f)(void*, int64_t, int64_t), void* context) {
  if (count <= 0) return;
  const int64_t parts = in_part ? 1 : std::min(thread_count(), (count + grain - 1) / grain);
  if (parts > 1 && this_process().run({f, context, count, parts})) return;
  f(context, 0, count);
}

}  // namespace cpu
}  // namespace qfx
