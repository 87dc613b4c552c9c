#include "hostweave/streams.h"

#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"

namespace hw {

Event::Event(unsigned flags) { HW_CHECK(cudaEventCreateWithFlags(&event_, flags)); }

Event::~Event() { cudaEventDestroy(event_); }

Events::Events(int count) : events_(count) {}

Events::~Events() = default;

void Events::out_of_range(int64_t i) const {
  throw ExecutionError("event " + std::to_string(i) + " of " + std::to_string(count()) + ": the index is out of range");
}

cudaError_t CallOrder::begin_call(cudaStream_t caller) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(caller, &status, &capture)) return error;
  capturing_ = status != cudaStreamCaptureStatusNone;
  if (!capturing_) return cudaStreamWaitEvent(caller, last_call_[0], 0);
  const bool first = std::exchange(capture_, capture) != capture;
  return first ? cudaStreamWaitEvent(caller, last_call_[0], cudaEventWaitExternal)
               : cudaStreamWaitEvent(caller, in_capture_[0], 0);
}

cudaError_t CallOrder::end_call(cudaStream_t caller) {
  if (!capturing_) return cudaEventRecord(last_call_[0], caller);
  if (const cudaError_t error = cudaEventRecordWithFlags(last_call_[0], caller, cudaEventRecordExternal)) return error;
  return cudaEventRecord(in_capture_[0], caller);  // after the node before: of two calls in one graph the later one records last
}

Streams::Streams(Rank& rank, const char* name, int count) : joined_(count) {
  for (int i = 0; i < count; ++i) streams_.push_back(rank.stream(name, i));
}

Streams::~Streams() = default;

cudaError_t Streams::fork(cudaStream_t caller, size_t first) {
  if (const cudaError_t error = cudaEventRecord(forked_[0], caller)) return error;
  for (size_t i = 0; i < first; ++i) {
    if (const cudaError_t error = cudaStreamWaitEvent(streams_[i], forked_[0], 0)) return error;
  }
  return cudaSuccess;
}

cudaError_t Streams::join(cudaStream_t caller, size_t first) {
  for (size_t i = 0; i < first; ++i) {
    if (const cudaError_t error = cudaEventRecord(joined_[i], streams_[i])) return error;
    if (const cudaError_t error = cudaStreamWaitEvent(caller, joined_[i], 0)) return error;
  }
  return cudaSuccess;
}

}  // namespace hw
