#include "hostweave/streams.h"

#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/index.h"

namespace hw {

Event::Event(unsigned flags) { HW_CHECK(cudaEventCreateWithFlags(&event_, flags)); }

Event::~Event() { cudaEventDestroy(event_); }

OwnStream::OwnStream() { HW_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }

OwnStream::~OwnStream() { cudaStreamDestroy(stream_); }

Events::Events(int count) : count_(count), events_(new Event[count]) {}

Events::~Events() { delete[] events_; }

void Events::out_of_range(int64_t i) const {
  throw ExecutionError("event " + std::to_string(i) + " of " + std::to_string(count()) + ": the index is out of range");
}

static thread_local bool of_kernels = false;

CallOrder::OfKernels::OfKernels() { of_kernels = true; }

CallOrder::OfKernels::~OfKernels() { of_kernels = false; }

cudaError_t CallOrder::begin_call(cudaStream_t caller) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(caller, &status, &capture)) return error;
  capturing_ = status != cudaStreamCaptureStatusNone;
  if (!capturing_) return cudaStreamWaitEvent(caller, last_call_[0], 0);
  const bool first = std::exchange(capture_, capture) != capture;
  if (of_kernels) return cudaSuccess;
  return first ? cudaStreamWaitEvent(caller, last_call_[0], cudaEventWaitExternal)
               : cudaStreamWaitEvent(caller, in_capture_[0], 0);
}

cudaError_t CallOrder::end_call(cudaStream_t caller) {
  if (!capturing_) return cudaEventRecord(last_call_[0], caller);
  if (of_kernels) return cudaSuccess;
  if (const cudaError_t error = cudaEventRecordWithFlags(last_call_[0], caller, cudaEventRecordExternal)) return error;
  // The next call in the capture waits for this second record, and records last_call_ only then.
  return cudaEventRecord(in_capture_[0], caller);
}

Streams::Streams(Rank& rank, const char* name, int count) : joined_(count) {
  for (int i = 0; i < count; ++i) streams_.push_back(rank.stream(name, i));
}

Stream Streams::operator[](int64_t i) const { return streams_[mod(i, static_cast<int64_t>(streams_.size()))]; }

cudaError_t Streams::fork(cudaStream_t caller, int64_t first) {
  if (const cudaError_t error = cudaEventRecord(forked_[0], caller)) return error;
  for (int64_t i = 0; i < first && i < joined_.count(); ++i) {
    if (const cudaError_t error = cudaStreamWaitEvent((*this)[i], forked_[0], 0)) return error;
  }
  return cudaSuccess;
}

cudaError_t Streams::join(cudaStream_t caller, int64_t first) {
  for (int64_t i = 0; i < first && i < joined_.count(); ++i) {
    if (const cudaError_t error = cudaEventRecord(joined_[i], (*this)[i])) return error;
    if (const cudaError_t error = cudaStreamWaitEvent(caller, joined_[i], 0)) return error;
  }
  return cudaSuccess;
}

}  // namespace hw
