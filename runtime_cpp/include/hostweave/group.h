// Ends this thread's NCCL group if an exception leaves the group's scope.
#pragma once
#include <nccl.h>

#include <exception>

namespace hw {

// Declare an object of this class between ncclGroupStart and ncclGroupEnd.
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
