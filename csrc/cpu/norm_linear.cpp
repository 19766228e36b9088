#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor norm_linear(Tensor x, Tensor norm_weight, double eps, Tensor weight) {
  Tensor y = empty_rows(x, weight.size(0));
  NormProject program(Rows(x), &norm_weight, eps, nullptr, weight, weight.size(0), y.mutable_data_ptr());
  run_alone(program);
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("norm_linear(Tensor x, Tensor norm_weight, float eps, Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("norm_linear", TORCH_BOX(&mtp::cpu::norm_linear)); }
