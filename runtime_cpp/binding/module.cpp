// The glue: makes a Python extension module of a program.
#include <exception>
#include <string>

#include "glue.h"
#include "hostweave/errors.h"

namespace py = pybind11;
using glue::table;

namespace {

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

  glue::bind_member(m);
}
