// What the files of the glue share. They are compiled once, when the package is built, and linked with the objects of
// every program; what they know of a program is the table in its binding.cpp.
#pragma once
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/device_lease.h"
#include "hostweave/errors.h"

namespace glue {

namespace py = pybind11;

inline const hw::ProgramTable& table() { return hw_program_table; }

inline hw::Shape shape_of(const std::vector<int64_t>& sizes) {
  if (sizes.size() > hw::kMaxDims) throw hw::ArgumentError("an array of more than 8 dims");
  hw::Shape shape;
  for (const int64_t size : sizes) shape.dims[shape.ndim++] = size;
  return shape;
}

// Calls `work` without the GIL.
template <class Work>
auto without_gil(const Work& work) {
  const py::gil_scoped_release release;
  return work();
}

// For what uses devices, and waits for other threads, when it ends: without the GIL, which a call in one of them may need.
// A process that was forked keeps what its parent made: it has the memory, and neither the threads nor the devices.
template <class T>
struct DeleteWithoutGil {
  pid_t process = getpid();  // where it was made

  void operator()(T* object) const {
    if (getpid() != process) return;
    const py::gil_scoped_release release;
    hw::DeviceLease::free([object] { delete object; });
  }
};
template <class T>
using Holder = std::unique_ptr<T, DeleteWithoutGil<T>>;

// Adds the classes to the module. Types are local to the module of a program; a member that another program's module made is
// accepted all the same.
void bind_member(py::module_& m);

}  // namespace glue
