// Runs a block of a kernel whose threads are coroutines (device.h).
#pragma once

#include <ucontext.h>

#include <functional>

#include "device.h"

namespace emulated {

inline std::function<void()> kernel;
inline bool ended[kMostThreads];
inline unsigned char stacks[kMostThreads][1 << 16];

inline void run_thread() {
  kernel();
  ended[thread.x] = true;
  _longjmp(scheduler, 1);
}

// Starts the thread, or lets it go on, until it stops.
[[gnu::noinline]] inline void run_on(bool from_the_start) {
  if (_setjmp(scheduler) != 0) {
    return;
  }
  if (!from_the_start) {
    _longjmp(stopped[thread.x], 1);
  }
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stacks[thread.x];
  start.uc_stack.ss_size = sizeof stacks[thread.x];
  makecontext(&start, run_thread, 0);
  setcontext(&start);
}

// As many threads as `all` has members.
inline void run_block(std::function<void()> what) {
  kernel = std::move(what);
  const int threads = all.members;
  for (int t = 0; t < threads; ++t) {
    ended[t] = false;
    copies[t].assign(1, {});
  }
  bool from_the_start = true;
  for (bool more = true; more; from_the_start = false) {
    more = false;
    for (int i = 0; i < threads; ++i) {
      thread.x = (i * 37 + block.x * 11) % threads;  // in another order in each block
      if (!ended[thread.x]) {
        more = true;
        run_on(from_the_start);
      }
    }
  }
}

}  // namespace emulated
