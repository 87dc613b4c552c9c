// The exceptions of the runtime. In Python they are hostweave.base.errors.ArgumentError and ExecutionError.
#pragma once
#include <stdexcept>

namespace hw {

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

}  // namespace hw
