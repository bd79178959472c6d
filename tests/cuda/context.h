// Stacks of their own, which code switches to and back from: what fibers are made of. One thread of
// the host, whose own stack is the scheduler's.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>

namespace qfx::emulated {

// Memory with a page that faults on either side; kept until the process ends.
char* map_guarded(size_t bytes);

struct Context {
  Context();

  char* stack;
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  void* fake_stack = nullptr;  // of the address sanitizer
};

// The context is at the first line of `main` again, wherever it was. `main` never returns.
void prepare(Context& c, void (*main)());

// From the scheduler: runs until the context suspends itself.
void resume(Context& c);

// From the context itself: back to the scheduler, until it is resumed.
void suspend(Context& self);

// The first thing that `main` does.
void entered(Context& self);

}  // namespace qfx::emulated
