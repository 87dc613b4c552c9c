// Calls of a program on one rank with arrays that lie anywhere, by way of its device's memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "hostweave/device_memory.h"
#include "hostweave/gate.h"
#include "hostweave/instance.h"

namespace hw {

// A contiguous local array.
struct Array {
  void* data = nullptr;
  size_t bytes = 0;
  int device = -1;  // -1: in host memory. Outputs are there or on the rank's GPU, inputs on any
};

struct Timing {
  double enqueue_us;            // host time of the program's `run`
  double total_ms;              // from the first to the last of its work on the device
  std::vector<float> marks_ms;  // from the first of it to each mark of a program that has some
};

class StagedCalls {
 public:
  // Which outlives it.
  explicit StagedCalls(Instance& instance);
  ~StagedCalls();
  StagedCalls(StagedCalls&&) = delete;

  struct Call {
    std::vector<Array> inputs, outputs;
  };
  // Takes memory for these calls, all of the shapes that the instance was prepared for, and fetches inputs from GPUs of other
  // ranks. All ranks prepare before any rank runs.
  void prepare(std::vector<Call> calls);
  // Makes the calls one after another and waits for the last. The host waits for nothing in between: inputs are copied in, and
  // outputs out, on the stream that the program is called on. With `poison` that stream first fills the outputs and the program's
  // temporaries with NaN.
  void run(const Schedule& schedule, bool poison);
  // The times of `repetitions` calls as the first one, after `warmups` others. Ranks begin each call together, with the inputs in
  // place.
  std::vector<Timing> measure(const Schedule& schedule, int warmups, int repetitions, Gate& gate);

 private:
  // Where the device has the arrays of a call.
  struct Placed {
    std::vector<void*> inputs, outputs;
  };

  void fetch(size_t call);
  std::vector<void*> place(std::vector<DeviceMemory>& staging, const std::vector<Array>& arrays) const;
  void copy(void* dst, const void* src, const Array& array, cudaMemcpyKind host_kind) const;
  void copy_in(size_t call) const;
  void copy_out(size_t call) const;
  void meet() const;
  void finish() const;

  Instance& instance_;
  Table nothing_bound_;
  int device_;
  cudaStream_t caller_ = nullptr;
  std::vector<DeviceMemory> inputs_, outputs_;      // of all calls
  std::vector<std::vector<DeviceMemory>> fetched_;  // [call][input]
  std::vector<Call> calls_;
  std::vector<Placed> placed_;
};

}  // namespace hw
