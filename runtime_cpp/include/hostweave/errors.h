// The exceptions of the runtime. In Python they are those of the same names in hostweave.base.errors.
#pragma once
#include <stdexcept>
#include <string>

namespace hw {

struct Name;
std::string text_of(const Name& argument);

// A call with an array of the wrong dtype, shape, device or layout. The message begins with the argument's name.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A call of CUDA, NCCL or cuBLASLt failed, or the ranks did not get through the program together.
class ExecutionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call that could not be captured. Nothing else has failed.
class CaptureError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

}  // namespace hw
