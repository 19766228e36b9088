// mtp_cuda::candidates: a centroid head behind its scores (candidates_kernel.h), as a private op on the stable ABI.
#include "candidates.h"

#include <cuda_runtime_api.h>

#include "op.h"

namespace mtp::cuda {
namespace {

constexpr char kOp[] = "candidates";

void candidates(Tensor scores, Tensor normed, Tensor token_ordering, Tensor lm_head, bool centroid_ordered,
                Tensor part_values, Tensor part_orders, Tensor part_max, Tensor part_sum, bool early) {
  const int64_t rows = scores.size(0);
  const int64_t vocab = token_ordering.size(0);
  const int64_t size = vocab / kCentroids;
  STD_TORCH_CHECK(vocab % (kCentroids * kPartTokens) == 0 && vocab > 0 && vocab < (int64_t{1} << 31),
                  "candidates: a vocabulary of ", vocab);
  STD_TORCH_CHECK(rows >= 1 && rows <= 65535, "candidates: ", rows, " rows");
  const int64_t parts = kActive * (size / kPartTokens);
  check(scores, kOp, "scores", ScalarType::Float, {rows, kCentroids});
  check(normed, kOp, "normed", ScalarType::BFloat16, {rows, kHeadHidden});
  check(part_values, kOp, "part_values", ScalarType::Float, {rows, parts, 1});
  check(part_orders, kOp, "part_orders", ScalarType::Long, {rows, parts, 1});
  check(part_max, kOp, "part_max", ScalarType::Float, {rows, parts});
  check(part_sum, kOp, "part_sum", ScalarType::Float, {rows, parts});
  const ScalarType index = token_ordering.scalar_type();
  STD_TORCH_CHECK(token_ordering.dim() == 1 && token_ordering.is_contiguous() &&
                      (index == ScalarType::Long || index == ScalarType::Int),
                  "candidates: token_ordering is not a contiguous list of int32 or int64");

  Candidates c;
  c.scores = scores.const_data_ptr<float>();
  c.normed = normed.const_data_ptr();
  c.ordering = token_ordering.const_data_ptr();
  c.ordering_is_int64 = index == ScalarType::Long;
  c.weight = matrix(lm_head, kOp, "lm_head", vocab, kHeadHidden);
  c.weight_stride = lm_head.stride(0);
  c.ordered = centroid_ordered;
  c.vocab = vocab;
  c.size = static_cast<int>(size);
  c.rows = static_cast<int>(rows);
  c.part_values = static_cast<float*>(part_values.mutable_data_ptr());
  c.part_orders = static_cast<int64_t*>(part_orders.mutable_data_ptr());
  c.part_max = static_cast<float*>(part_max.mutable_data_ptr());
  c.part_sum = static_cast<float*>(part_sum.mutable_data_ptr());
  const int device = scores.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int error = launch_candidates(c, early, current_stream(device));
  STD_TORCH_CHECK(error == 0, "candidates: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace
}  // namespace mtp::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cuda, m) {
  m.def(
      "candidates(Tensor scores, Tensor normed, Tensor token_ordering, Tensor lm_head, bool centroid_ordered, "
      "Tensor(a!) part_values, Tensor(b!) part_orders, Tensor(c!) part_max, Tensor(d!) part_sum, bool early) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cuda, CUDA, m) { m.impl("candidates", TORCH_BOX(&mtp::cuda::candidates)); }
