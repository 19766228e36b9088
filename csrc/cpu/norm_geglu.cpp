#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor norm_geglu(Tensor x, Tensor norm_weight, double eps, Tensor gate_up_weight) {
  const std::vector<const void*> rows = row_pointers(x);
  const int64_t count = static_cast<int64_t>(rows.size());
  const Tensor workspace = packed_workspace(count, x.size(-1), 1);
  Tensor y = empty_rows(x, gate_up_weight.size(0) / 2);
  pack_rows(x, rows, &norm_weight, eps, workspace, nullptr);
  LinearParams p = linear_params(gate_up_weight, count, x.size(-1), 1, workspace, y);
  p.out = gate_up_weight.size(0) / 2;
  for_columns(linear_kernels().geglu[element_type(x)], p);
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("norm_geglu(Tensor x, Tensor norm_weight, float eps, Tensor gate_up_weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("norm_geglu", TORCH_BOX(&mtp::cpu::norm_geglu)); }
