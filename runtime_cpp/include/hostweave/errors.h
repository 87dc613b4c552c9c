// Exceptions of the runtime. In Python, hostweave.base.errors has exceptions of the same names.
#pragma once
#include <stdexcept>
#include <string>

namespace hw {

struct Name;
std::string text_of(const Name& argument);

// An argument or a size of a call is invalid, for example because of a wrong dtype, shape or device.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The program cannot run, for example because a CUDA, NCCL or cuBLASLt call failed.
class ExecutionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A capture failed, or a stream that is being captured does not allow the call. The program remains usable.
class CaptureError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

}  // namespace hw
