// The launch of candidates_kernel.h.
#include "candidates.h"

#include "candidates_kernel.h"
#include "launch.h"

namespace mtp::cuda {

int launch_candidates(const Candidates& c, bool early, void* stream) {
  const auto kernel = c.ordered ? rank_candidates<true> : rank_candidates<false>;
  const dim3 grid(blocks_of_row(c), c.rows);
  const cudaError_t error = share_memory(kernel, 0);
  return static_cast<int>(error ? error : launch_kernel(kernel, c, grid, kThreads, 0, {early}, stream));
}

}  // namespace mtp::cuda
