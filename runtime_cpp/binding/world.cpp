// All ranks in this process: what Program.run uses.
#include "hostweave/world.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "glue.h"
#include "hostweave/errors.h"
#include "hostweave/runner.h"

namespace glue {
namespace {

// (shape of the global array or (), address, shape, bytes, device), as hostweave.runtime.arrays describes an array.
hw::Array array_of(const py::handle& view) {
  using Sizes = std::vector<int64_t>;
  const auto [global_shape, address, sizes, bytes, device] = view.cast<std::tuple<Sizes, uintptr_t, Sizes, size_t, int>>();
  return {reinterpret_cast<void*>(address), shape_of(sizes), bytes, device, shape_of(global_shape)};
}

std::vector<std::vector<hw::Array>> arrays_of(const py::handle& per_rank) {
  std::vector<std::vector<hw::Array>> result;
  for (const py::handle views : per_rank) {
    result.emplace_back();
    for (const py::handle view : views) result.back().push_back(array_of(view));
  }
  return result;
}

// (inputs, outputs), each [rank][parameter].
hw::Call call_of(const py::handle& pair) {
  const auto both = pair.cast<std::pair<py::object, py::object>>();
  return {arrays_of(both.first), arrays_of(both.second)};
}

// Runs Python's signal handlers. True: one has raised, as Ctrl-C does, or the interpreter ends.
bool signal_raised() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) return true;
  try {
    py::module_::import("hostweave.runtime.lifetime").attr("expect_going_on")();
    return false;
  } catch (py::error_already_set& error) {
    error.restore();
    return true;
  }
}

void run(hw::Runner& runner, const hw::Schedule& schedule, const py::list& calls, bool poison) {
  std::vector<hw::Call> all;
  for (const py::handle call : calls) all.push_back(call_of(call));
  without_gil([&] { runner.run(schedule, all, poison, signal_raised); });
}

std::vector<std::vector<hw::Timing>> measure(hw::Runner& runner, const hw::Schedule& schedule, const py::tuple& call, int warmups,
                                             int repetitions) {
  const hw::Call arrays = call_of(call);
  return without_gil([&] { return runner.measure(schedule, arrays, warmups, repetitions, signal_raised); });
}

}  // namespace

void bind_world(py::module_& m) {
  py::class_<hw::Schedule>(m, "Schedule", py::module_local())
      .def(py::init<bool, uint64_t, int, int, int, int, double>(), py::kw_only(), py::arg("seeded"), py::arg("seed"),
           py::arg("picker"), py::arg("ordered_launches"), py::arg("buffered_sends"), py::arg("check_dependencies"),
           py::arg("timeout_seconds"));

  py::class_<hw::World, Holder<hw::World>>(m, "World", py::module_local())
      .def(py::init([](int ranks) { return without_gil([&] { return Holder<hw::World>(new hw::World(ranks)); }); }),
           py::arg("ranks"))
      .def_property_readonly("broken", &hw::World::broken);

  py::class_<hw::Timing>(m, "Timing", py::module_local())
      .def_readonly("enqueue_us", &hw::Timing::enqueue_us)
      .def_readonly("total_ms", &hw::Timing::total_ms);

  py::class_<hw::Runner, Holder<hw::Runner>>(m, "Runner", py::module_local())
      .def(py::init([](hw::World& world, bool measures) {
             return without_gil([&] { return Holder<hw::Runner>(new hw::Runner(world, table(), measures, signal_raised)); });
           }),
           py::arg("world"), py::arg("measures"), py::keep_alive<1, 2>())
      .def("run", run)
      .def("measure", measure);
}

}  // namespace glue
