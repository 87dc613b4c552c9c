// The memory of a program's temporaries, which its calls use one after another.
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
  // Its calls are among those of other programs, too.
  explicit Arena(CallOrder& calls);

  // Gives every buffer of the plan its place. Memory grows when larger sizes come, and stays. What a graph may use stays where
  // it is as long as the program lives.
  void reserve(MemoryPlan& plan);

  // As of CallOrder.
  cudaError_t begin_call(cudaStream_t caller) const { return calls_->begin_call(caller); }
  cudaError_t end_call(cudaStream_t caller) const { return calls_->end_call(caller); }

  // All of it, to `visit` with its bytes.
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
