// Memory of a program's temporaries. Calls use this memory one after another.
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
  // Calls of all programs with the same `calls` run one after another.
  explicit Arena(CallOrder& calls);

  // Places every buffer of the plan. The memory grows if needed, and never shrinks. Old memory stays allocated until the arena is
  // destroyed if a graph may use this memory.
  void reserve(MemoryPlan& plan);

  // begin_call and end_call enclose the work of a call; see CallOrder.
  cudaError_t begin_call(cudaStream_t caller) const { return calls_->begin_call(caller); }
  cudaError_t end_call(cudaStream_t caller) const { return calls_->end_call(caller); }

  // Part `number` of the current memory. Returns null if the memory has fewer parts, not counting empty parts.
  void* part(size_t number, size_t* bytes) const;

 private:
  struct Memory;
  Hidden<Memory> memory_;
  CallOrder own_calls_;
  CallOrder* calls_ = &own_calls_;
};

}  // namespace hw
