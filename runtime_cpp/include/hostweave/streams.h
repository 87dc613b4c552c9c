// Streams and events of a program, made once. What takes a compiler long is in the library: programs are compiled by users.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "hostweave/index.h"
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

  int64_t count() const { return static_cast<int64_t>(events_.size()); }
  // Throws ExecutionError where there is no such event.
  cudaEvent_t operator[](int64_t i) const {
    if (i < 0 || i >= count()) [[unlikely]]
      out_of_range(i);
    return events_[i];
  }

 private:
  [[noreturn]] void out_of_range(int64_t i) const;
  std::vector<Event> events_;
};

// Streams that are walked round robin, fork from the caller's stream and join it.
class Streams {
 public:
  Streams(Rank& rank, const char* name, int count);
  ~Streams();

  // Stream i modulo their number, of a negative index, too.
  Stream operator[](int64_t i) const { return streams_[mod(i, static_cast<int64_t>(streams_.size()))]; }
  // Every stream waits for what `caller` holds.
  cudaError_t fork(cudaStream_t caller);
  // `caller` waits for what the streams hold.
  cudaError_t join(cudaStream_t caller);

 private:
  std::vector<Stream> streams_;
  Events forked_{1};
  Events joined_;
};

}  // namespace hw
