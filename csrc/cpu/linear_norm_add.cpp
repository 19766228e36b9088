#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor linear_norm_add(Tensor x, std::optional<Tensor> weight, Tensor norm_weight, double eps, Tensor residual,
                       std::optional<Tensor> scale) {
  const std::vector<const void*> rows = row_pointers(x);
  const std::vector<const void*> residual_rows = row_pointers(residual);
  const int64_t count = static_cast<int64_t>(rows.size());
  Tensor y = empty_rows(x, norm_weight.size(0));
  AddNormRowsParams p{};
  p.norm_weight = norm_weight.const_data_ptr();
  p.norm_weight_is_float = is_float(norm_weight);
  p.eps = static_cast<float>(eps);
  p.residual = residual_rows.data();
  if (scale) {
    p.scale = scale->const_data_ptr();
    p.scale_is_float = is_float(*scale);
  }
  p.columns = norm_weight.size(0);
  p.y = y.mutable_data_ptr();
  std::optional<Tensor> projected;  // kept until the last kernel is done
  if (weight) {
    projected = empty_float({count, p.columns});
    const Tensor workspace = packed_workspace(count, x.size(-1), 1);
    pack_rows(x, rows, nullptr, eps, workspace, nullptr);
    for_columns(linear_kernels().linear_float[element_type(x)],
                linear_params(*weight, count, x.size(-1), 1, workspace, *projected));
    p.projected = data<float>(*projected);
  } else {
    p.x = rows.data();
  }
  for_rows(linear_rows_kernels().add_norm[element_type(x)], p, count, p.columns);
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "linear_norm_add(Tensor x, Tensor? weight, Tensor norm_weight, float eps, Tensor residual, *, "
      "Tensor? scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("linear_norm_add", TORCH_BOX(&mtp::cpu::linear_norm_add)); }
