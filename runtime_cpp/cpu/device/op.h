// What is enqueued: ops with the bytes that they touch, the streams that hold them, the events that name a point of a stream.
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

// --- vector clocks: what is known to have happened before a point of a stream or of a rank's host threads

// One counter for every stream and every device's host side ("lane"). A missing counter is zero.
class Clock {
 public:
  std::uint32_t at(std::size_t lane) const { return lane < counters_.size() ? counters_[lane] : 0; }
  std::uint32_t tick(std::size_t lane) {
    if (lane >= counters_.size()) counters_.resize(lane + 1);
    return ++counters_[lane];
  }
  void join(const Clock& other) {
    if (other.counters_.size() > counters_.size()) counters_.resize(other.counters_.size());
    for (std::size_t i = 0; i < other.counters_.size(); ++i) counters_[i] = std::max(counters_[i], other.counters_[i]);
  }

 private:
  std::vector<std::uint32_t> counters_;
};

using ClockSnapshot = std::shared_ptr<const Clock>;

// --- the bytes that an op reads or writes

struct Range {  // `rows` pieces of `bytes` bytes, `pitch` apart
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::size_t rows = 1;
  std::size_t pitch = 0;
  bool write = false;
  bool scratch = false;  // written, but nobody reads what is left there

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

struct Place {  // of a call in the program; the strings are interned, so that reports may outlive the program
  const char* file = nullptr;
  int line = 0;
  const char* call = nullptr;
};

// How reports speak of an op. Small, because the access history keeps one for every range.
struct OpName {
  int device = 0;
  int stream = 0;
  const char* kind = "";           // "all_reduce", "copy", a kernel's name
  const char* process_group = "";  // the communicator's name, for communications
  int subject = -1;                // which argument of the call holds what the op produces or sends
  Place place;

  std::string text() const;  // rank 0 stream 1: all_reduce h over x (program.cpp:41)
};

struct Part {  // an op's role in a collective, a send or a recv
  std::shared_ptr<Match> match;
  int index;
};

struct Stream;

// The signals of one rank to another under one number: how many are there, and what the ranks have enqueued.
struct SignalCount {
  int sender = 0;  // devices
  int number = 0;
  std::uint64_t given = 0, awaited = 0;           // enqueued
  std::uint64_t value = 0;                        // of the last one that is there
  std::map<std::uint64_t, ClockSnapshot> clocks;  // what was known when the count came to be this
  std::vector<Stream*> waiters;

  bool settled() const { return given == awaited && given == value; }
};
struct SignalTurn {  // the n-th signal of a count
  std::shared_ptr<SignalCount> count;
  std::uint64_t number;
};

struct Op {
  OpName name;
  Stream* stream = nullptr;
  Ranges ranges;
  std::function<void()> work;              // runs without the scheduler's lock; none for markers and communications
  std::vector<Part> parts;                 // a communication group: all of it begins and ends as one
  std::vector<std::shared_ptr<Op>> after;  // must be done before this begins
  std::vector<SignalTurn> awaits;          // must be there before this begins
  std::vector<SignalTurn> gives;           // when it ends
  ClockSnapshot host_clock;                // what the enqueuing host knew
  ClockSnapshot clock;                     // what this op's begin knew, then what its end knows
  std::vector<Stream*> waiters;            // streams whose head waits for this op
  std::chrono::steady_clock::time_point finished;
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
  bool scheduled = false;  // in the ready list, or being run
  const Op* blocked_on = nullptr;
  std::deque<OpPtr> queue;
  OpPtr last;  // the op enqueued last, done or not
  std::size_t lane = 0;
  Clock clock;
  std::uint64_t rank_in_picker = 0;
  std::shared_ptr<Capture> capture;  // null: calls enqueue
  std::size_t capture_lane = 0;

  bool legacy() const { return number == 0; }
  bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};

struct Event {
  int device = 0;
  bool timed = true;
  OpPtr record;                      // the last one; a wait binds to it when it is called
  std::shared_ptr<Capture> capture;  // in which it was recorded last, as this node
  std::size_t node = 0;
};

}  // namespace hostweave::cpu
