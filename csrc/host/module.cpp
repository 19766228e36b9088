// mtp_kernels._host: the launch heuristics, for tests and tools. No op needs it.
#include <pybind11/pybind11.h>

#include <string>

#include "mtp/split_plan.h"

namespace py = pybind11;
using mtp::SplitPlan;

namespace {

SplitPlan checked_plan(int64_t visible_len) {
  if (visible_len < 0) {
    throw py::value_error("split_plan: visible_len: expected at least 0, got " + std::to_string(visible_len));
  }
  return mtp::split_plan(visible_len);
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Launch heuristics: pure functions from the sizes of a problem to a launch, no torch in them.";

  py::class_<SplitPlan> plan(m, "SplitPlan", "How the visible keys of a request are split.");
  plan.def_readonly("keys_per_split", &SplitPlan::keys_per_split)
      .def_readonly("num_splits", &SplitPlan::num_splits)
      .def("__repr__", [](const SplitPlan& self) {
        return "SplitPlan(keys_per_split=" + std::to_string(self.keys_per_split) +
               ", num_splits=" + std::to_string(self.num_splits) + ")";
      });

  m.def("split_plan", &checked_plan, py::arg("visible_len"),
        "The splits that draft_attention's C++ kernel gives a request of so many visible keys, whatever the batch.");
}
