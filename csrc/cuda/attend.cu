// The launch of attend_kernel.h.
#include "attend.h"

#include "attend_kernel.h"
#include "launch.h"

namespace mtp::cuda {
namespace {

template <int kTiles, int kRing, bool kFolds>
cudaError_t launch(const Attend& a, int blocks, bool early, void* stream) {
  const auto kernel = attend<kTiles, kRing, kFolds>;
  const int bytes = bytes_of<kTiles, kRing>(a, kFolds);
  const cudaError_t error = share_memory(kernel, bytes);
  return error ? error : launch_kernel(kernel, a, dim3(blocks), kAttendThreads, bytes, {early}, stream);
}

}  // namespace

int launch_attend(const Attend& a, int blocks, bool early, void* stream) {
  const int queries = a.rows * a.group;
  const bool folds = a.chunks_a_part > 1;
  const auto launches = queries > kAttendFew ? (folds ? launch<2, kRingOf16, true> : launch<2, kRingOf16, false>)
                                             : (folds ? launch<1, kRingOf4, true> : launch<1, kRingOf4, false>);
  return static_cast<int>(launches(a, blocks, early, stream));
}

}  // namespace mtp::cuda
