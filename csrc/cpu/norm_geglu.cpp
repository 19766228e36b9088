#include "linear.h"

namespace mtp::cpu {
namespace {

Tensor norm_geglu(Tensor x, Tensor norm_weight, double eps, Tensor gate_up_weight) {
  Tensor y = empty_rows(x, gate_up_weight.size(0) / 2);
  NormGeglu program(Rows(x), norm_weight, eps, gate_up_weight, y.mutable_data_ptr());
  run_alone(program);
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("norm_geglu(Tensor x, Tensor norm_weight, float eps, Tensor gate_up_weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("norm_geglu", TORCH_BOX(&mtp::cpu::norm_geglu)); }
