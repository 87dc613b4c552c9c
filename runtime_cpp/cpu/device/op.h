// Enqueued work: ops with their memory accesses, streams, and events.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace hostweave::cpu {

struct Match;
struct Capture;

// --- vector clocks: order of points on streams and host threads

// One counter per actor. An actor is a stream, or the host thread of a device. A missing counter is zero.
class Clock {
 public:
  std::uint32_t at(std::size_t actor) const { return actor < counters_.size() ? counters_[actor] : 0; }
  std::uint32_t tick(std::size_t actor) {
    if (actor >= counters_.size()) counters_.resize(actor + 1);
    return ++counters_[actor];
  }
  void join(const Clock& other) {
    if (other.counters_.size() > counters_.size()) counters_.resize(other.counters_.size());
    for (std::size_t i = 0; i < other.counters_.size(); ++i) counters_[i] = std::max(counters_[i], other.counters_[i]);
  }

 private:
  std::vector<std::uint32_t> counters_;
};

using ClockSnapshot = std::shared_ptr<const Clock>;

// --- byte ranges of accesses

struct Range {  // `rows` pieces of `bytes` bytes with stride `pitch`
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::size_t rows = 1;
  std::size_t pitch = 0;
  bool write = false;
  bool scratch = false;  // written, but nothing uses the contents afterwards

  bool empty() const { return bytes == 0 || rows == 0; }
  std::uintptr_t end() const { return empty() ? begin : begin + (rows - 1) * pitch + bytes; }
};

using Ranges = std::vector<Range>;

inline Range read_of(const void* pointer, std::size_t bytes, std::size_t rows = 1, std::size_t pitch = 0) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, rows, pitch, false, false};
}
inline Range scratch_of(const void* pointer, std::size_t bytes) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, 1, 0, true, true};
}
inline Range write_of(const void* pointer, std::size_t bytes, std::size_t rows = 1, std::size_t pitch = 0) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, rows, pitch, true, false};
}

// --- ops

struct Location {  // position of a call in the source; strings are interned, so that reports can outlive the program
  const char* file = nullptr;
  int line = 0;
  const char* call = nullptr;
};

// Name of an op for reports. The struct is small, because the access history stores many.
struct OpName {
  int device = 0;
  int stream = 0;
  const char* kind = "";           // "all_reduce", "copy", or a kernel's name
  const char* process_group = "";  // the communicator's name, for communications
  int subject = -1;                // index of the argument that is named in reports; -1: none
  Location location;

  std::string text() const;  // such as "rank 0 stream 1: all_reduce h over communicator 2 (program.cpp:41)"
  std::string what() const;  // "all_reduce h over communicator 2 (program.cpp:41)"
};

struct Part {  // an op's seat in a Match (communicator.h)
  std::shared_ptr<Match> match;
  int index;
};

struct Stream;

// Counts of the signals with one number from one rank to another.
struct SignalCount {
  int sender = 0;  // device number
  int number = 0;
  std::uint64_t given = 0, awaited = 0;           // number of enqueued signals, and number for which enqueued waits wait
  std::uint64_t value = 0;                        // number of arrived signals
  std::map<std::uint64_t, ClockSnapshot> clocks;  // sender's clock at each count
  std::vector<Stream*> waiters;

  bool settled() const { return given == awaited && given == value; }
};
struct SignalTurn {  // the n-th signal of a SignalCount
  std::shared_ptr<SignalCount> count;
  std::uint64_t number;
};

struct Op {
  OpName name;
  Stream* stream = nullptr;
  Ranges ranges;
  std::function<void()> work;              // runs without the lock; may be empty
  std::vector<Part> parts;                 // NCCL calls of the op; they begin and end together
  std::vector<std::shared_ptr<Op>> after;  // ops that must end before this op begins
  std::vector<SignalTurn> awaits;          // signals that must arrive before this op begins
  std::vector<SignalTurn> gives;           // signals that are given when this op ends
  ClockSnapshot host_clock;                // clock of the enqueuing host
  ClockSnapshot clock;                     // clock of the stream when the op ends
  std::vector<Stream*> waiters;            // streams whose head op waits for this op
  std::chrono::steady_clock::time_point finished;
  std::vector<std::uint64_t*> marks;  // words to increment when the op is done
  bool begun = false;
  bool done = false;
};
using OpPtr = std::shared_ptr<Op>;

inline OpPtr new_op(const char* kind, int subject, Ranges ranges = {}) {
  auto op = std::make_shared<Op>();
  op->name.kind = kind;
  op->name.subject = subject;
  op->ranges = std::move(ranges);
  return op;
}

struct Stream {
  int device = 0;
  int number = 0;  // 0 is the legacy default stream
  unsigned flags = 0;
  bool destroyed = false;
  bool scheduled = false;  // in the ready list, or running
  const Op* blocked_on = nullptr;
  std::deque<OpPtr> queue;
  OpPtr last;        // last enqueued op
  OpName last_done;  // name of the op that ended last
  std::size_t actor = 0;
  Clock clock;
  std::uint64_t rank_in_picker = 0;
  std::shared_ptr<Capture> capture;  // null: not being captured
  std::size_t index_in_capture = 0;

  bool legacy() const { return number == 0; }
  bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};

struct Event {
  int device = 0;
  bool timed = true;
  OpPtr record;                      // last record; later waits for the event wait for this op
  std::shared_ptr<Capture> capture;  // capture of the last record, if that record was captured
  std::size_t node = 0;              // node of that record
};

}  // namespace hostweave::cpu
