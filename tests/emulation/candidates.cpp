// Runs csrc/cuda/candidates_kernel.h on a CPU (device.h): the blocks of a launch one after the other.
#include "block.h"
#include "device.h"

#undef __shared__
#define __shared__ static  // of a block, and the next one finds what it left

#include "candidates_kernel.h"

// The arguments as mtp_cuda::candidates makes them.
extern "C" void emulate_candidates(const void* const* p, const int64_t* n) {
  using namespace mtp::cuda;
  Candidates c;
  c.scores = static_cast<const float*>(*p++), c.normed = *p++, c.ordering = *p++, c.weight = *p++;
  c.part_values = static_cast<float*>(const_cast<void*>(*p++));
  c.part_orders = static_cast<int64_t*>(const_cast<void*>(*p++));
  c.part_max = static_cast<float*>(const_cast<void*>(*p++));
  c.part_sum = static_cast<float*>(const_cast<void*>(*p++));
  c.ordering_is_int64 = *n++ != 0, c.ordered = *n++ != 0;
  c.weight_stride = *n++, c.vocab = *n++;
  c.size = static_cast<int>(*n++), c.rows = static_cast<int>(*n++);
  const auto kernel = c.ordered ? rank_candidates<true> : rank_candidates<false>;
  emulated::all.members = kThreads;
  emulated::grid.x = blocks_of_row(c);
  emulated::grid.y = c.rows;
  for (emulated::block.x = 0; emulated::block.x < emulated::grid.x; ++emulated::block.x) {
    for (emulated::block.y = 0; emulated::block.y < c.rows; ++emulated::block.y) {  // finds what another row's left
      emulated::run_block([&] { kernel(c); });
    }
  }
}
