// Exceptions of the runtime. hostweave.base.errors has the same exceptions in Python.
#pragma once
#include <stdexcept>
#include <string>

namespace hw {

struct Name;
std::string text_of(const Name& argument);

// An argument has the wrong dtype, shape, device or layout. The message begins with its name.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A CUDA, NCCL or cuBLASLt call failed, or a rank failed to take part in the program.
class ExecutionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call could not be captured. The program remains usable.
class CaptureError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

}  // namespace hw
