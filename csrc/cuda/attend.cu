// The launch of attend_kernel.h.
#include "attend.h"

#include "attend_kernel.h"
#include "launch.h"

namespace mtp::cuda {

int launch_attend(const Attend& a, int blocks, bool early, void* stream) {
  return static_cast<int>(with_kernel(a, [&](void (*kernel)(Attend), int threads, int bytes) {
    const cudaError_t error = share_memory(kernel, bytes);
    return error ? error : launch_kernel(kernel, a, dim3(blocks), threads, bytes, {early}, stream);
  }));
}

}  // namespace mtp::cuda
