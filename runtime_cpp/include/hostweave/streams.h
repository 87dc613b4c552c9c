// Streams and events of a program, made once. What takes a compiler long is in the library: programs are compiled by users.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/hidden.h"
#include "hostweave/rank.h"

namespace hw {

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming);
  ~Event();
  Event(Event&&) = delete;

  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Events {
 public:
  explicit Events(int count);
  ~Events();
  Events(Events&&) = delete;

  int64_t count() const { return count_; }
  // Throws ExecutionError where there is no such event.
  cudaEvent_t operator[](int64_t i) const {
    if (i < 0 || i >= count()) [[unlikely]]
      out_of_range(i);
    return events_[i];
  }

 private:
  [[noreturn]] void out_of_range(int64_t i) const;
  int64_t count_;
  Event* events_;
};

// Calls that use the same memory or signals, one after another, whatever streams they are on.
class CallOrder {
 public:
  // The work of a call stands between these two: `caller` first waits for the call before. Where `caller` is being captured,
  // wait and record are nodes of the graph: each of its launches waits for the call or launch before it, and is waited for by
  // the next. Then nothing depends on what lies outside of the capture. Inside of OfKernels there are no such nodes.
  cudaError_t begin_call(cudaStream_t caller);
  cudaError_t end_call(cudaStream_t caller);
  // Whether the call that has begun is being captured.
  bool capturing() const { return capturing_; }

  // While it lives, this thread captures calls whose launches are each made between `begin_call` and `end_call`: a graph that is
  // all kernels, one after another, is launched in the same time however many they are.
  class OfKernels {
   public:
    OfKernels();
    ~OfKernels();
    OfKernels(OfKernels&&) = delete;
  };

  // Whether a call was captured, so that a graph may be launched at any time.
  bool in_graphs() const { return capture_ != 0; }

 private:
  Events last_call_{1};             // or launch of a graph
  Events in_capture_{1};            // the last call of the capture
  unsigned long long capture_ = 0;  // that a call was last in; 0: none yet
  bool capturing_ = false;          // the call that is being made
};

// Streams that are walked round robin, fork from the caller's stream and join it.
class Streams {
 public:
  Streams(Rank& rank, const char* name, int count);

  // Stream i modulo their number, of a negative index, too.
  Stream operator[](int64_t i) const;
  // Every stream, or the first ones, wait for what `caller` holds.
  cudaError_t fork(cudaStream_t caller, int64_t first = INT64_MAX);
  // `caller` waits for what the streams hold.
  cudaError_t join(cudaStream_t caller, int64_t first = INT64_MAX);

 private:
  struct Pool;
  Hidden<Pool> pool_;
  Events forked_{1};
  Events joined_;
};

}  // namespace hw
