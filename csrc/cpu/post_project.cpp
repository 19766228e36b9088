#include "linear.h"

namespace mtp::cpu {
namespace {

std::tuple<Tensor, Tensor> post_project(Tensor x, Tensor norm_weight, double eps, Tensor weight) {
  const std::vector<const void*> rows = row_pointers(x);
  const int64_t count = static_cast<int64_t>(rows.size());
  const Tensor workspace = packed_workspace(count, x.size(-1), 1);
  Tensor normed = empty_rows(x, x.size(-1));
  Tensor state = empty_rows(x, weight.size(0));
  pack_rows(x, rows, &norm_weight, eps, workspace, &normed);
  for_columns(linear_kernels().linear[element_type(x)], linear_params(weight, count, x.size(-1), 1, workspace, state));
  return {normed, state};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("post_project(Tensor x, Tensor norm_weight, float eps, Tensor weight) -> (Tensor normed, Tensor state)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("post_project", TORCH_BOX(&mtp::cpu::post_project)); }
