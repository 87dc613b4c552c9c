// The memory of a program's temporaries, which its calls use one after another.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "hostweave/device_memory.h"
#include "hostweave/memory_plan.h"
#include "hostweave/streams.h"

namespace hw {

class Arena {
 public:
  // Gives every buffer of the plan its place. Memory grows when larger sizes come, and stays.
  void reserve(MemoryPlan& plan) { plan.set_pointers(memory_.reserve(plan.place())); }

  // The work of a call stands between these two: `caller` first waits for the call before, whatever stream that was on.
  cudaError_t begin_call(cudaStream_t caller) { return cudaStreamWaitEvent(caller, last_call_[0], 0); }
  cudaError_t end_call(cudaStream_t caller) { return cudaEventRecord(last_call_[0], caller); }

  void* data() const { return memory_.data(); }
  size_t bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  Events last_call_{1};
};

}  // namespace hw
