// The memory of a program's temporaries, which its calls use one after another.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "hostweave/device_memory.h"
#include "hostweave/memory_plan.h"
#include "hostweave/streams.h"

namespace hw {

class Arena {
 public:
  // Gives every buffer of the plan its place. Memory grows when larger sizes come, and stays. What a graph may use stays where
  // it is as long as the program lives.
  void reserve(MemoryPlan& plan);

  // The work of a call stands between these two: `caller` first waits for the call before, whatever stream that was on. Where
  // `caller` is being captured, wait and record are nodes of the graph: each of its launches waits for the call or launch
  // before it, and is waited for by the next. Then nothing depends on what lies outside of the capture.
  cudaError_t begin_call(cudaStream_t caller);
  cudaError_t end_call(cudaStream_t caller);

  void* data() const { return memory_.data(); }
  size_t bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  std::vector<DeviceMemory> of_graphs_;  // memory that was outgrown
  Events last_call_{1};                  // or launch of a graph
  Events in_capture_{1};                 // the last call of the capture
  unsigned long long capture_ = 0;       // that a call was last in; 0: none yet
  bool capturing_ = false;               // the call that is being made
};

}  // namespace hw
