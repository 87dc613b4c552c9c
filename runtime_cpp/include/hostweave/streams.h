// Streams and events of a program. Parts that compile slowly are in the library, to keep builds of programs fast.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "hostweave/rank.h"

namespace hw {

// Event. This type selects the overloads below.
class EventOfCall {
 public:
  explicit EventOfCall(cudaEvent_t event) : event_(event) {}
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_;
};

// Overloads of CUDA's functions that also add the record or wait to the call log.
using ::cudaEventRecord;
using ::cudaStreamWaitEvent;
inline cudaError_t cudaEventRecord(EventOfCall event, cudaStream_t stream) {
  if (CallLog* const log = CallLog::current()) log->records(event, stream);
  return ::cudaEventRecord(static_cast<cudaEvent_t>(event), stream);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, EventOfCall event, unsigned flags) {
  if (CallLog* const log = CallLog::current()) log->awaits(event, stream);
  return ::cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event), flags);
}

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming);
  ~Event();
  Event(Event&&) = delete;

  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// A new stream that does not synchronise with the default stream.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(OwnStream&&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Events {
 public:
  explicit Events(int count);
  ~Events();
  Events(Events&&) = delete;

  int64_t count() const { return count_; }
  // Throws ExecutionError if there is no such event.
  EventOfCall operator[](int64_t i) const {
    if (i < 0 || i >= count()) [[unlikely]]
      out_of_range(i);
    return EventOfCall(events_[i]);
  }

 private:
  [[noreturn]] void out_of_range(int64_t i) const;
  int64_t count_;
  Event* events_;
};

// Orders calls that use the same memory or signals: one call runs after the other, even on different streams.
class CallOrder {
 public:
  // `begin_call` and `end_call` enclose the work of a call. `begin_call` makes `caller` wait for the previous call, and
  // `end_call` records the end of this call. In a capture, the first wait and each record become nodes of the graph. So launches
  // of the graph are ordered with calls. While this thread has an OfKernels, a capture gets no such nodes.
  cudaError_t begin_call(cudaStream_t caller);
  cudaError_t end_call(cudaStream_t caller);
  // True if the current call is being captured.
  bool capturing() const { return capturing_; }

  // RAII: this thread captures calls without the nodes of `begin_call` and `end_call`. The graph must be launched between
  // `begin_call` and `end_call`. Without these nodes, a graph can be a chain of kernels. A chain launches nearly as fast as one
  // kernel.
  class OfKernels {
   public:
    OfKernels();
    ~OfKernels();
    OfKernels(OfKernels&&) = delete;
  };

  // True if a call was captured, so a graph may be launched at any time.
  bool in_graphs() const { return capture_ != 0; }

 private:
  Events last_call_{1};             // end of the last call or graph launch
  Events in_capture_{1};            // end of the last call in the current capture
  unsigned long long capture_ = 0;  // id of the last capture; 0: none yet
  bool capturing_ = false;          // true if the current call is being captured
};

// Pool of streams that fork from the caller's stream and join it.
class Streams {
 public:
  Streams(Rank& rank, const char* name, int count);

  // Stream i modulo the size of the pool; i may be negative.
  Stream operator[](int64_t i) const;
  // Makes the first `first` streams of the pool, or all, wait for `caller`.
  cudaError_t fork(cudaStream_t caller, int64_t first = INT64_MAX);
  // Makes `caller` wait for the first `first` streams of the pool, or for all.
  cudaError_t join(cudaStream_t caller, int64_t first = INT64_MAX);

 private:
  std::vector<Stream> streams_;
  Events forked_{1};
  Events joined_;
};

}  // namespace hw
