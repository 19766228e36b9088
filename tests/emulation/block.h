// Runs a block of a kernel whose threads are coroutines (device.h).
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "device.h"

namespace emulated {

inline std::function<void()> kernel;
inline bool started[kMostThreads], ended[kMostThreads];
inline unsigned char stacks[kMostThreads][1 << 16];

inline void run_thread() {
  kernel();
  ended[thread.x] = true;
  _longjmp(scheduler, 1);
}

// Starts the thread, or lets it go on, until it stops.
[[gnu::noinline]] inline void run_on() {
  if (_setjmp(scheduler) != 0) {
    return;
  }
  if (started[thread.x]) {
    _longjmp(stopped[thread.x], 1);
  }
  started[thread.x] = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stacks[thread.x];
  start.uc_stack.ss_size = sizeof stacks[thread.x];
  makecontext(&start, run_thread, 0);
  setcontext(&start);
}

// Runs all threads of the late warp that do not wait, or all others: each until it stops. Whether there was one.
inline bool run_threads(bool late) {
  const int threads = all.members, warps = threads / 32;
  bool ran = false;
  for (int i = 0; i < threads; ++i) {
    thread.x = (i * 37 + block.x * 11) % threads;  // in another order in each block
    if ((thread.x / 32 == block.x % warps) == late && !ended[thread.x] && !waits[thread.x].goes_on()) {
      run_on();
      ran = true;
    }
  }
  return ran;
}

// As many threads as `all` has members. One warp, another in each block, runs only when all others wait: who does not
// wait for it is early.
inline void run_block(std::function<void()> what) {
  kernel = std::move(what);
  for (int t = 0; t < all.members; ++t) {
    started[t] = ended[t] = false;
    waits[t] = {};
    copies[t].assign(1, {});
  }
  while (run_threads(false) || run_threads(true)) {
  }
  if (!std::all_of(ended, ended + all.members, [](bool done) { return done; })) {
    std::fprintf(stderr, "threads of block %d wait for each other\n", block.x);
    std::abort();
  }
}

}  // namespace emulated
