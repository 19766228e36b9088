#include "linear.h"

namespace mtp::cpu {
namespace {

std::tuple<Tensor, Tensor> post_project(Tensor x, Tensor norm_weight, double eps, Tensor weight) {
  Tensor normed = empty_rows(x, x.size(-1));
  Tensor state = empty_rows(x, weight.size(0));
  NormProject program(Rows(x), &norm_weight, eps, normed.mutable_data_ptr(), weight, weight.size(0),
                      state.mutable_data_ptr());
  run_alone(program);
  return {normed, state};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def("post_project(Tensor x, Tensor norm_weight, float eps, Tensor weight) -> (Tensor normed, Tensor state)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("post_project", TORCH_BOX(&mtp::cpu::post_project)); }
