// The launch of frontier_kernel.h, compiled for Hopper alone.
#include "attend.h"

#include "frontier_kernel.h"
#include "launch.h"

namespace mtp::cuda {

static_assert(sizeof(FrontierShared) <= 227 * 1024);

int launch_frontier(const Attend& a, int blocks, bool early, void* stream) {
  return static_cast<int>(with_frontier(a, [&](void (*kernel)(Attend), int threads, int bytes) {
    const cudaError_t error = share_memory(kernel, bytes);
    return error ? error : launch_kernel(kernel, a, dim3(blocks), threads, bytes, {early}, stream);
  }));
}

}  // namespace mtp::cuda
