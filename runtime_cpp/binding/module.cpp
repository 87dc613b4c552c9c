// Python bindings of a program. This file is compiled once, when the package is built. Then it is linked into the module of every
// program. The code accesses the program through the table in binding.cpp. Each module has separate Python types, but a module
// also accepts a Member of another module.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/algorithms.h"
#include "hostweave/background.h"
#include "hostweave/call_log.h"
#include "hostweave/device_lease.h"
#include "hostweave/errors.h"
#include "hostweave/group_memory.h"
#include "hostweave/instance.h"
#include "hostweave/member.h"
#include "hostweave/staging.h"

namespace py = pybind11;

namespace pybind11::detail {

template <>
struct type_caster<hw::Shape> {
  PYBIND11_TYPE_CASTER(hw::Shape, const_name("tuple[int, ...]"));

  bool load(handle source, bool convert) {
    list_caster<std::vector<int64_t>, int64_t> sizes;
    if (!sizes.load(source, convert)) return false;
    const auto& known = static_cast<std::vector<int64_t>&>(sizes);
    if (known.size() > hw::kMaxDims) throw hw::ArgumentError("an array of more than 8 dims");
    for (const int64_t size : known) value.dims[value.ndim++] = size;
    return true;
  }
  static handle cast(const hw::Shape& shape, return_value_policy, handle) {
    tuple sizes(shape.ndim);
    for (int i = 0; i < shape.ndim; ++i) sizes[i] = shape[i];
    return sizes.release();
  }
};

// Converts values of NCCL and cuBLASLt, such as ids, to and from Python bytes.
template <class T>
struct BytesCaster {
  PYBIND11_TYPE_CASTER(T, const_name("bytes"));

  bool load(handle source, bool) {
    if (!isinstance<bytes>(source)) return false;
    const std::string_view known = reinterpret_borrow<bytes>(source);
    if (known.size() != sizeof value)
      throw hw::ExecutionError("expected " + std::to_string(sizeof value) + " bytes, got " + std::to_string(known.size()));
    std::memcpy(&value, known.data(), sizeof value);
    return true;
  }
  static handle cast(const T& value, return_value_policy, handle) {
    return bytes(reinterpret_cast<const char*>(&value), sizeof value).release();
  }
};
template <>
struct type_caster<ncclUniqueId> : BytesCaster<ncclUniqueId> {};
template <>
struct type_caster<cublasLtMatmulAlgo_t> : BytesCaster<cublasLtMatmulAlgo_t> {};

}  // namespace pybind11::detail

namespace {

const hw::ProgramTable& table() { return hw_program_table; }

// Releases the GIL while a function runs. Use it only for functions that access no Python objects.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

// Deleter for objects that use devices and wait for other threads. The deleter releases the GIL, because those threads may need
// the GIL. A forked process does not delete the objects of its parent, because the forked process lacks the threads and devices
// of its parent.
template <class T>
struct DeleteWithoutGil {
  pid_t process = getpid();  // process that made the object

  void operator()(T* object) const {
    if (getpid() != process) return;
    const py::gil_scoped_release release;
    hw::DeviceLease::free([object] {
      const hw::BesideCaptures beside;  // Python may collect an object while this thread captures.
      delete object;
    });
  }
};
template <class T>
using Holder = std::unique_ptr<T, DeleteWithoutGil<T>>;

std::vector<void*> pointers(const std::vector<uintptr_t>& addresses) {
  std::vector<void*> result;
  for (const uintptr_t address : addresses) result.push_back(reinterpret_cast<void*>(address));
  return result;
}

cudaStream_t stream_at(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

std::vector<hw::Shape> prepare(hw::Instance& instance, const std::vector<hw::Shape>& shapes,
                               const std::vector<hw::Shape>& global_shapes, uintptr_t stream) {
  std::vector<hw::Instance::Input> inputs;
  for (size_t i = 0; i < shapes.size(); ++i) inputs.push_back({shapes[i], global_shapes[i]});
  return instance.prepare(inputs, stream_at(stream));
}

// Keys of the process groups without a channel, and the index of this rank in each process group.
std::vector<std::pair<std::string, int64_t>> missing_process_groups(const hw::Member& member) {
  std::vector<std::pair<std::string, int64_t>> result;
  for (const hw::ProcessGroup& process_group : member.missing_process_groups(table()))
    result.emplace_back(process_group.key, process_group.rank_in_group);
  return result;
}

void connect(hw::Member& member, const std::map<std::string, ncclUniqueId>& ids, double timeout) {
  member.connect(table(), ids, timeout);
}

void adopt(hw::Member& member, const std::map<std::string, uintptr_t>& communicators) {
  std::map<std::string, ncclComm_t> given;
  for (const auto& [axes, address] : communicators) given[axes] = reinterpret_cast<ncclComm_t>(address);
  member.adopt(table(), given);
}

// The structs of dlpack.h.
struct DLTensor {
  void* data;
  int32_t device_type, device;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// A contiguous array in a DLPack capsule. The object keeps the owner of the memory alive.
struct Lent {
  DLManagedTensor managed;
  std::vector<int64_t> shape;
  py::object owner;
};

py::capsule dlpack(py::object owner, uintptr_t address, std::pair<int, int> device, std::vector<int64_t> shape, int code,
                   int bits) {
  auto* const lent = new Lent{{}, std::move(shape), std::move(owner)};
  lent->managed.tensor = {.data = reinterpret_cast<void*>(address),
                          .device_type = device.first,
                          .device = device.second,
                          .ndim = static_cast<int32_t>(lent->shape.size()),
                          .code = static_cast<uint8_t>(code),
                          .bits = static_cast<uint8_t>(bits),
                          .lanes = 1,
                          .shape = lent->shape.data()};
  lent->managed.context = lent;
  lent->managed.deleter = [](DLManagedTensor* managed) {
    const py::gil_scoped_acquire gil;
    delete static_cast<Lent*>(managed->context);
  };
  return py::capsule(&lent->managed, "dltensor", [](PyObject* capsule) {  // A consumer renames the capsule.
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  });
}

hw::Table table_of(const std::vector<std::optional<uintptr_t>>& bound) {
  std::vector<std::optional<void*>> pointers;
  for (const std::optional<uintptr_t>& address : bound)
    pointers.push_back(address ? std::optional(reinterpret_cast<void*>(*address)) : std::nullopt);
  return {std::move(pointers)};
}

void run(hw::Instance& instance, const hw::Table& bound, const std::vector<uintptr_t>& inputs,
         const std::vector<uintptr_t>& outputs, uintptr_t stream, const hw::Schedule& schedule, hw::Graphs graphs) {
  instance.run(schedule, bound, pointers(inputs), pointers(outputs), stream_at(stream), graphs);
}

Holder<hw::Graph> capture(hw::Instance& instance, const hw::Table& bound, const std::vector<uintptr_t>& inputs,
                          const std::vector<uintptr_t>& outputs) {
  return Holder<hw::Graph>(instance.capture(bound, pointers(inputs), pointers(outputs)).release());
}

void launch(hw::Instance& instance, const hw::Graph& graph, uintptr_t stream, const hw::Schedule& schedule) {
  instance.launch(schedule, graph, stream_at(stream));
}

// (address, bytes, device) of each array.
using Arrays = std::vector<std::tuple<uintptr_t, size_t, int>>;

std::vector<hw::Array> arrays_of(const Arrays& views) {
  std::vector<hw::Array> arrays;
  for (const auto& [address, bytes, device] : views) arrays.push_back({reinterpret_cast<void*>(address), bytes, device});
  return arrays;
}

// `calls` has the inputs and the outputs of each call.
void place(hw::Staging& staging, const std::vector<std::pair<Arrays, Arrays>>& calls) {
  std::vector<hw::Staging::Call> all;
  for (const auto& [inputs, outputs] : calls) all.push_back({arrays_of(inputs), arrays_of(outputs)});
  staging.place(std::move(all));
}

void set_measured_algorithms(const std::map<std::string, cublasLtMatmulAlgo_t>& algorithms) {
  for (const auto& [problem, algorithm] : algorithms) hw::measured_algorithms().set(problem, algorithm);
}

// Fields of CallLog::State: made, done and waiting_seconds.
std::tuple<int64_t, int64_t, double> progress(hw::Instance& instance) {
  const hw::CallLog::State state = instance.progress();
  return {state.made, state.done, state.waiting_seconds};
}

// State of the streams of the rank in an unfinished call or graph launch, in the format of runtime/standstill.py.
py::dict standstill(hw::Instance& instance) {
  const hw::Standstill seen = [&] {
    const py::gil_scoped_release release;
    return instance.standstill();
  }();
  using py::literals::operator""_a;
  py::list streams;
  for (const hw::Standstill::Stream& one : seen.streams) {
    streams.append(py::dict("name"_a = one.name, "done"_a = one.done, "next"_a = one.next, "behind"_a = one.behind,
                            "edge"_a = py::cast(one.edge).attr("name"), "source"_a = one.from,
                            "source_stream"_a = one.from_stream, "channel"_a = one.channel, "ranks"_a = one.ranks,
                            "number"_a = one.number, "nth"_a = one.nth));
  }
  return py::dict("call"_a = seen.call, "is_graph"_a = seen.is_graph, "is_enqueuing"_a = seen.is_enqueuing,
                  "enqueued"_a = seen.enqueued, "streams"_a = streams, "finished"_a = seen.finished, "begun"_a = seen.begun);
}

void raise(const char* type, const std::string& message) {
  const std::string text = std::string(table().name) + ": " + message;
  PyErr_SetString(py::module_::import("hostweave.base.errors").attr(type).ptr(), text.c_str());
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const hw::ArgumentError& e) {
    raise("ArgumentError", e.what());
  } catch (const hw::CaptureError& e) {
    raise("CaptureError", e.what());
  } catch (const hw::ExecutionError& e) {
    raise("ExecutionError", e.what());
  }
}

}  // namespace

PYBIND11_MODULE(hostweave_program, m) {
  if (table().abi != hw::kAbi) throw py::import_error("this program was built for another version of hostweave");
  py::register_local_exception_translator(translate);

  m.attr("__doc__") = std::string("The program ") + table().name + " on " + table().mesh;
  m.attr("name") = table().name;
  m.attr("mesh") = table().mesh;
  m.attr("prepares_together") = table().prepares_together;

  py::class_<hw::Schedule>(m, "Schedule", py::module_local())
      .def(py::init<bool, uint64_t, int, int, int, int, double>(), py::kw_only(), py::arg("seeded"), py::arg("seed"),
           py::arg("picker"), py::arg("ordered_launches"), py::arg("buffered_sends"), py::arg("check_dependencies"),
           py::arg("timeout_seconds"));

  py::class_<hw::DeviceLease>(m, "DeviceLease", py::module_local());
  py::class_<hw::Member, Holder<hw::Member>>(m, "Member", py::module_local())
      .def(py::init<std::string, int, int64_t, int64_t, bool>(), py::arg("group"), py::arg("device"), py::arg("rank"),
           py::arg("count"), py::arg("processes"))
      .def_property_readonly("device", &hw::Member::device)
      .def_property_readonly("stopped", &hw::Member::stopped)
      .def("abort", &hw::Member::abort, py::arg("reason"), WithoutGil());

  m.def(  // This is a function of the module, so that errors name its program.
      "lease",
      [](const hw::Schedule& schedule, const hw::Member& member, double seconds) { return member.lease(schedule, seconds); },
      py::arg("schedule"), py::arg("member"), py::arg("seconds"), WithoutGil());
  m.def("device_for", &hw::Member::device_for, py::arg("rank"), py::arg("local_rank"));
  m.def(
      "new_id", [](hw::Member& member, const std::string& key) { return member.new_process_group_id(table(), key); },
      py::arg("member"), py::arg("key"), WithoutGil());
  m.def("finish_background", &hw::finish_background, py::arg("seconds"), WithoutGil());
  m.def("is_captured", [](uintptr_t stream) { return hw::is_captured(stream_at(stream)); }, py::arg("stream"));
  m.def("missing_process_groups", missing_process_groups, py::arg("member"));
  m.def("connect", connect, py::arg("member"), py::arg("ids"), py::arg("timeout"), WithoutGil());
  m.def("out_of_reach", [](hw::Member& member) { return member.out_of_reach(table()); }, py::arg("member"), WithoutGil());
  m.def("adopt", adopt, py::arg("member"), py::arg("communicators"), WithoutGil());
  m.def("new_peer_id", [](hw::Member& member) { return member.new_id(hw::Transport::peer); }, py::arg("member"), WithoutGil());
  m.def("connect_all", &hw::GroupMemory::connect, py::arg("member"), py::arg("id"), py::arg("timeout"), WithoutGil());
  py::class_<hw::GroupMemory, Holder<hw::GroupMemory>>(m, "GroupMemory", py::module_local())
      .def(py::init<hw::Member&, size_t>(), py::arg("member"), py::arg("bytes"), py::keep_alive<1, 2>(), WithoutGil())
      .def_property_readonly("address", [](const hw::GroupMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); });
  m.def("dlpack", dlpack, py::arg("owner"), py::arg("address"), py::arg("device"), py::arg("shape"), py::arg("code"),
        py::arg("bits"));

  m.def("blas_version", [] { return cublasLtGetVersion(); });
  m.def("measured_algorithms", [] { return hw::measured_algorithms().known(); });
  m.def("set_measured_algorithms", set_measured_algorithms, py::arg("algorithms"));

  py::enum_<hw::Graphs>(m, "Graphs", py::module_local())
      .value("never", hw::Graphs::never)
      .value("noted", hw::Graphs::noted)
      .value("repeated", hw::Graphs::repeated)
      .value("all", hw::Graphs::all);
  py::enum_<hw::Standstill::Edge>(m, "Edge", py::module_local())
      .value("none", hw::Standstill::Edge::none)
      .value("event", hw::Standstill::Edge::event)
      .value("call_before", hw::Standstill::Edge::call_before)
      .value("signal", hw::Standstill::Edge::signal)
      .value("credit", hw::Standstill::Edge::credit)
      .value("transfer", hw::Standstill::Edge::transfer)
      .value("collective", hw::Standstill::Edge::collective)
      .value("unknown", hw::Standstill::Edge::unknown);
  py::class_<hw::Graph, Holder<hw::Graph>>(m, "Graph", py::module_local());
  py::class_<hw::Table>(m, "Table", py::module_local()).def(py::init(&table_of), py::arg("bound"));

  py::class_<hw::Gate, Holder<hw::Gate>>(m, "Gate", py::module_local()).def(py::init<int>(), WithoutGil());
  py::class_<hw::Timing>(m, "Timing", py::module_local())
      .def_readonly("enqueue_us", &hw::Timing::enqueue_us)
      .def_readonly("total_ms", &hw::Timing::total_ms)
      .def_readonly("marks_ms", &hw::Timing::marks_ms);
  py::class_<hw::Staging, Holder<hw::Staging>>(m, "Staging", py::module_local())
      .def(py::init<hw::Member&>(), py::arg("member"), py::keep_alive<1, 2>(), WithoutGil())
      .def("place", place, py::arg("calls"), WithoutGil());

  py::class_<hw::Instance, Holder<hw::Instance>>(m, "Instance", py::module_local())
      .def(py::init([](hw::Member& member, bool measures, bool marks_graphs) {
             return new hw::Instance(member, table(), measures, marks_graphs);
           }),
           py::arg("member"), py::arg("measures"), py::arg("marks_graphs"), py::keep_alive<1, 2>(), WithoutGil())
      .def("prepare", prepare, py::arg("shapes"), py::arg("global_shapes"), py::arg("stream"), WithoutGil())
      .def("run", run, py::arg("bound"), py::arg("inputs"), py::arg("outputs"), py::arg("stream"), py::arg("schedule"),
           py::arg("graphs"), WithoutGil())
      .def("run_staged", &hw::Instance::run_staged, py::arg("schedule"), py::arg("staging"), py::arg("poison"), WithoutGil())
      .def("measure", &hw::Instance::measure, py::arg("schedule"), py::arg("staging"), py::arg("warmups"), py::arg("repetitions"),
           py::arg("gate"), WithoutGil())
      .def("capture", capture, py::arg("bound"), py::arg("inputs"), py::arg("outputs"), WithoutGil(),
           py::keep_alive<0, 1>())  // A communicator must outlive the graphs that use it.
      .def("launch", launch, py::arg("graph"), py::arg("stream"), py::arg("schedule"), WithoutGil())
      .def("progress", progress, WithoutGil())
      .def("standstill", standstill)
      .def_property_readonly("graphs", &hw::Instance::graphs)
      .def_property_readonly("unseen", &hw::Instance::unseen);
}
