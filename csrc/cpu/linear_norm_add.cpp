#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor linear_norm_add(Tensor x, std::optional<Tensor> weight, Tensor norm_weight, double eps, Tensor residual,
                       std::optional<Tensor> scale) {
  Tensor y = empty_rows(x, norm_weight.size(0));
  LinearNormAdd program(Rows(x), weight ? &*weight : nullptr, norm_weight, eps, Rows(residual),
                        scale ? &*scale : nullptr, y.mutable_data_ptr());
  run_alone(program);
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
