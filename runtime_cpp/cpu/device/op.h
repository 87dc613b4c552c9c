// What is enqueued: ops, the streams that hold them, the events that name a point of a stream.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "cuda_runtime_api.h"
#include "range.h"

namespace hostweave::cpu {

struct Match;

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

struct Op {
  OpName name;
  Stream* stream = nullptr;
  Ranges ranges;
  std::function<void()> work;              // runs without the scheduler's lock; none for markers and communications
  std::vector<Part> parts;                 // a communication group: all of it begins and ends as one
  std::vector<std::shared_ptr<Op>> after;  // must be done before this begins
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
  int priority = 0;
  bool destroyed = false;
  bool scheduled = false;  // in the ready list, or being run
  const Op* blocked_on = nullptr;
  std::deque<OpPtr> queue;
  OpPtr last;  // the op enqueued last, done or not
  std::size_t lane = 0;
  Clock clock;
  std::uint64_t rank_in_picker = 0;

  bool legacy() const { return number == 0; }
  bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};

struct Event {
  int device = 0;
  bool timed = true;
  OpPtr record;  // the last one; a wait binds to it when it is called
};

}  // namespace hostweave::cpu
