// The launch of attend_kernel.h.
#include "attend.h"

#include <cuda_runtime.h>

#include "attend_kernel.h"

namespace mtp::cuda {
namespace {

template <int kTiles, int kRing, bool kFolds>
cudaError_t launch(const Attend& a, int blocks, bool early, cudaStream_t stream) {
  const auto kernel = attend<kTiles, kRing, kFolds>;
  const int bytes = bytes_of<kTiles, kRing>(a, kFolds);
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    return error;
  }
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                     cudaSharedmemCarveoutMaxShared)) {
    return error;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kAttendThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

int launch_attend(const Attend& a, int blocks, bool early, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const int queries = a.rows * a.group;
  const bool folds = a.chunks_a_part > 1;
  const auto launches = queries > kAttendFew ? (folds ? launch<2, kRingOf16, true> : launch<2, kRingOf16, false>)
                                             : (folds ? launch<1, kRingOf4, true> : launch<1, kRingOf4, false>);
  return static_cast<int>(launches(a, blocks, early, on));
}

}  // namespace mtp::cuda
