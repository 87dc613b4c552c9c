// Memory of a program's temporaries. Calls use it one after another.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "hostweave/hidden.h"
#include "hostweave/memory_plan.h"
#include "hostweave/streams.h"

namespace hw {

class Arena {
 public:
  Arena();
  // `calls` may also order calls of other programs.
  explicit Arena(CallOrder& calls);

  // Places every buffer of the plan. Memory grows for larger sizes and never shrinks. Memory that a captured graph may use stays
  // in place as long as the program lives.
  void reserve(MemoryPlan& plan);

  // See CallOrder.
  cudaError_t begin_call(cudaStream_t caller) const { return calls_->begin_call(caller); }
  cudaError_t end_call(cudaStream_t caller) const { return calls_->end_call(caller); }

  // Calls visit(address, bytes) for all memory.
  template <class Visit>
  void each_memory(Visit&& visit) const {
    visit(data(), bytes());
  }

 private:
  void* data() const;
  size_t bytes() const;

  struct Memory;
  Hidden<Memory> memory_;
  CallOrder own_calls_;
  CallOrder* calls_ = &own_calls_;
};

}  // namespace hw
