// Calls of a program on one rank, with arrays in host or device memory. Misaligned arrays, and arrays that are not on the rank's
// device, are copied.
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
  int device = -1;  // -1: host memory. Outputs must be in host memory or on the rank's GPU. Inputs may be anywhere.
};

struct Timing {
  double enqueue_us;            // host time of the program's `enqueue`
  double total_ms;              // device time from the first to the last work
  std::vector<float> marks_ms;  // times from the first work to each mark
};

class StagedCalls {
 public:
  // The instance must outlive this object.
  explicit StagedCalls(Instance& instance);
  ~StagedCalls();
  StagedCalls(StagedCalls&&) = delete;

  struct Call {
    std::vector<Array> inputs, outputs;
  };
  // Allocates memory for these calls, and copies inputs from other GPUs. The arrays must have the prepared shapes. All
  // ranks prepare before any rank runs.
  void prepare(std::vector<Call> calls);
  // Enqueues all calls, and waits until they are done. Copies inputs and outputs on the stream of the calls. With `poison`, sets
  // all bytes of outputs and temporaries to 0xff before each call, which is NaN in floats.
  void run(const Schedule& schedule, bool poison);
  // Times `repetitions` repetitions of the first call, after `warmups` untimed repetitions. All ranks start each repetition
  // together, except the very first, timed or untimed. The times exclude copies of arrays.
  std::vector<Timing> measure(const Schedule& schedule, int warmups, int repetitions, Gate& gate);

 private:
  // Device addresses of the arrays of a call.
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
  std::vector<DeviceMemory> inputs_, outputs_;      // memory for copies of arrays, shared by all calls
  std::vector<std::vector<DeviceMemory>> fetched_;  // [call][input]
  std::vector<Call> calls_;
  std::vector<Placed> placed_;
};

}  // namespace hw
