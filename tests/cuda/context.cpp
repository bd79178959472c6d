#include "context.h"

#include <sys/mman.h>

#include "fibers.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace qfx::emulated {
namespace {

constexpr size_t kStack = 256 << 10, kPage = 4096;
jmp_buf scheduler;

#if defined(__SANITIZE_ADDRESS__)
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
void before_context(Context& c) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, c.stack, kStack);
}
void in_scheduler() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
void in_context(Context& c) {
  __sanitizer_finish_switch_fiber(c.fake_stack, &scheduler_stack, &scheduler_stack_size);
}
void before_scheduler(Context& c) {
  __sanitizer_start_switch_fiber(&c.fake_stack, scheduler_stack, scheduler_stack_size);
}
#else
void before_context(Context&) {}
void in_scheduler() {}
void in_context(Context&) {}
void before_scheduler(Context&) {}
#endif

}  // namespace

char* map_guarded(size_t bytes) {
  void* area = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) throw Fault("no memory for the emulator");
  char* inner = static_cast<char*>(area) + kPage;
  if (mprotect(inner, bytes, PROT_READ | PROT_WRITE) != 0) throw Fault("mprotect failed");
  return inner;
}

Context::Context() : stack(map_guarded(kStack)) {}

void prepare(Context& c, void (*main)()) {
  getcontext(&c.start);
  c.start.uc_stack.ss_sp = c.stack;
  c.start.uc_stack.ss_size = kStack;
  c.start.uc_link = nullptr;
  makecontext(&c.start, main, 0);
  c.started = false;
  c.fake_stack = nullptr;
}

void resume(Context& c) {
  before_context(c);
  if (_setjmp(scheduler) == 0) {
    if (c.started) _longjmp(c.at, 1);
    c.started = true;
    setcontext(&c.start);
  }
  in_scheduler();
}

void suspend(Context& self) {
  before_scheduler(self);
  if (_setjmp(self.at) == 0) _longjmp(scheduler, 1);
  in_context(self);
}

void entered(Context& self) { in_context(self); }

}  // namespace qfx::emulated
