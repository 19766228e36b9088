// The launch of frontier_kernel.h, compiled for Hopper alone.
#include "attend.h"

#include "frontier_kernel.h"
#include "launch.h"

namespace mtp::cuda {

int launch_frontier(const Attend& a, int blocks, bool early, void* stream) {
  constexpr int kBytes = sizeof(FrontierShared);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = a.chunks_a_part > 1 ? attend_frontier<true> : attend_frontier<false>;
  const cudaError_t error = share_memory(kernel, kBytes);
  return static_cast<int>(
      error ? error : launch_kernel(kernel, a, dim3(blocks), Frontier::kAllThreads, kBytes, {early}, stream));
}

}  // namespace mtp::cuda
