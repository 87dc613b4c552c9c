#include "hostweave/arena.h"

#include <utility>

#include "hostweave/check.h"

namespace hw {

void Arena::reserve(MemoryPlan& plan) {
  const size_t total = plan.place();
  if (total > memory_.bytes() && capture_ != 0) of_graphs_.push_back(std::exchange(memory_, {}));
  plan.set_pointers(memory_.reserve(total));
}

cudaError_t Arena::begin_call(cudaStream_t caller) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(caller, &status, &capture)) return error;
  capturing_ = status != cudaStreamCaptureStatusNone;
  if (!capturing_) return cudaStreamWaitEvent(caller, last_call_[0], 0);
  const bool first = std::exchange(capture_, capture) != capture;
  return first ? cudaStreamWaitEvent(caller, last_call_[0], cudaEventWaitExternal)
               : cudaStreamWaitEvent(caller, in_capture_[0], 0);
}

cudaError_t Arena::end_call(cudaStream_t caller) {
  if (!capturing_) return cudaEventRecord(last_call_[0], caller);
  if (const cudaError_t error = cudaEventRecordWithFlags(last_call_[0], caller, cudaEventRecordExternal)) return error;
  return cudaEventRecord(in_capture_[0], caller);  // after the node before: of two calls in one graph the later one records last
}

}  // namespace hw
