#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor norm_linear(Tensor x, Tensor norm_weight, double eps, Tensor weight) {
  const std::vector<const void*> rows = row_pointers(x);
  const int64_t count = static_cast<int64_t>(rows.size());
  const Tensor workspace = packed_workspace(count, x.size(-1), 1);
  Tensor y = empty_rows(x, weight.size(0));
  pack_rows(x, rows, &norm_weight, eps, workspace, nullptr);
  for_columns(linear_kernels().linear[element_type(x)], linear_params(weight, count, x.size(-1), 1, workspace, y));
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("norm_linear(Tensor x, Tensor norm_weight, float eps, Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("norm_linear", TORCH_BOX(&mtp::cpu::norm_linear)); }
