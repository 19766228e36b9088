// Runs a block of a kernel whose threads are coroutines (device.h).
#pragma once

#include <functional>

#include "device.h"

namespace emulated {

inline std::function<void()> kernel;
inline bool ended[kMostThreads];
inline unsigned char stacks[kMostThreads][1 << 16];

inline void run_thread() {
  kernel();
  ended[thread.x] = true;
}

// As many threads as `all` has members.
inline void run_block(std::function<void()> what) {
  kernel = std::move(what);
  const int threads = all.members;
  for (int t = 0; t < threads; ++t) {
    ended[t] = false;
    copies[t].assign(1, {});
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks[t];
    contexts[t].uc_stack.ss_size = sizeof stacks[t];
    contexts[t].uc_link = &scheduler;
    makecontext(&contexts[t], run_thread, 0);
  }
  for (bool more = true; more;) {
    more = false;
    for (int i = 0; i < threads; ++i) {
      thread.x = (i * 37 + block.x * 11) % threads;  // in another order in each block
      if (!ended[thread.x]) {
        more = true;
        swapcontext(&scheduler, &contexts[thread.x]);
      }
    }
  }
}

}  // namespace emulated
