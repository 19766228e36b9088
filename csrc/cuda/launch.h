// What the launches of kernels share. A kernel of a round may start before the one in front of it has ended (sm_90 and
// later), so it asks for SMs whose memory is all shared memory.
#pragma once

#include <cuda_runtime.h>

namespace mtp::cuda {

// An SM divides its memory anew only when it is empty: with less than all of it shared, no block of a kernel that
// starts early would find room beside one of this.
template <class Arguments>
cudaError_t share_memory(void (*kernel)(Arguments), int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error ? error
               : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared);
}

struct Start {
  bool early = false;        // before the kernel in front of it has ended
  bool cooperative = false;  // all blocks at a time
};

template <class Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments), const Arguments& arguments, dim3 grid, int threads, int bytes,
                          Start start, void* stream) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (start.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (start.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace mtp::cuda
