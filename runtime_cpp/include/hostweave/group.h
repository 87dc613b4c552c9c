// Ends this thread's NCCL group if an exception is thrown in it.
#pragma once
#include <nccl.h>

#include <exception>

namespace hw {

// Declare it between ncclGroupStart and ncclGroupEnd.
class CloseGroupOnError {
 public:
  CloseGroupOnError() = default;
  ~CloseGroupOnError() {
    if (std::uncaught_exceptions() > exceptions_) ncclGroupEnd();
  }
  CloseGroupOnError(CloseGroupOnError&&) = delete;

 private:
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace hw
