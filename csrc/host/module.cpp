// mtp_kernels._host: the launch heuristics, for tests and tools. No op needs it.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>

#include "mtp/split_plan.h"

namespace py = pybind11;
using mtp::SplitPlan;
using mtp::SplitProblem;

namespace {

// repr, equality and hash of a frozen struct.
template <class Struct>
void add_value_methods(py::class_<Struct>& type) {
  type.def("__repr__", [](const Struct& self) { return mtp::to_string(self); });
  type.def(py::self == py::self);
  type.def("__hash__", [](const Struct& self) { return py::hash(py::str(mtp::to_string(self))); });
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Launch heuristics: pure functions from the sizes of a problem to a launch, no GPU and no torch in them.";

  py::class_<SplitProblem> problem(m, "SplitProblem", "One request of one attention layer.");
  problem.def(
      py::init([](int64_t visible_len, int64_t page_size, int64_t rows, int64_t num_qo_heads, int64_t num_kv_heads,
                  int64_t head_dim, int64_t element_size, int64_t num_sms, int64_t first_key) {
        return SplitProblem{visible_len,  first_key, page_size,    rows,   num_qo_heads,
                            num_kv_heads, head_dim,  element_size, num_sms};
      }),
      py::kw_only(), py::arg("visible_len"), py::arg("page_size"), py::arg("rows"), py::arg("num_qo_heads"),
      py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("element_size"), py::arg("num_sms"),
      py::arg("first_key") = 0);
  problem.def_readonly("visible_len", &SplitProblem::visible_len)
      .def_readonly("first_key", &SplitProblem::first_key)
      .def_readonly("page_size", &SplitProblem::page_size)
      .def_readonly("rows", &SplitProblem::rows)
      .def_readonly("num_qo_heads", &SplitProblem::num_qo_heads)
      .def_readonly("num_kv_heads", &SplitProblem::num_kv_heads)
      .def_readonly("head_dim", &SplitProblem::head_dim)
      .def_readonly("element_size", &SplitProblem::element_size)
      .def_readonly("num_sms", &SplitProblem::num_sms);
  add_value_methods(problem);

  py::class_<SplitPlan> plan(m, "SplitPlan", "How the visible keys of a request are split over blocks.");
  plan.def_readonly("start", &SplitPlan::start)
      .def_readonly("tile_keys", &SplitPlan::tile_keys)
      .def_readonly("keys_per_split", &SplitPlan::keys_per_split)
      .def_readonly("num_splits", &SplitPlan::num_splits);
  add_value_methods(plan);

  m.def("split_plan", &mtp::split_plan, py::arg("problem"),
        "The splits of a request: from its own sizes alone, never from the batch.");
  m.def("max_splits", &mtp::max_splits, py::arg("problem"),
        "The most splits of any request of at most problem.visible_len visible keys.");
  m.def("workspace_bytes", &mtp::workspace_bytes, py::arg("problem"), py::arg("batch"),
        "Bytes for the partial results of `batch` requests of at most problem.visible_len visible keys.");
}
