// Exceptions of the runtime. In Python, hostweave.base.errors has exceptions of the same names.
#pragma once
#include <stdexcept>
#include <string>

namespace hw {

struct Name;
std::string text_of(const Name& argument);

// An argument or a size of a call is invalid, for example because of a wrong dtype, shape or device.
struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The program cannot run, for example because a CUDA, NCCL or cuBLASLt call failed.
struct ExecutionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A capture failed, or a stream that is being captured does not allow the call. The program remains usable.
struct CaptureError : ExecutionError {
  using ExecutionError::ExecutionError;
};

}  // namespace hw
