#include "hostweave/call_log.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/milestones.h"
#include "hostweave/standstill.h"

namespace hw {

namespace {

using LogClock = std::chrono::steady_clock;

enum class Kind : uint8_t { work, record, wait, signal, wait_signal, transfer, collective };

struct LoggedOp {
  Kind kind = Kind::work;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  const Channel* channel = nullptr;
  int peer = 0;    // world rank
  int number = 0;  // number of a signal
  int milestone = Milestones::kNone;
  int group = 0;  // number of an NCCL group, from 1
  int line = 0;
  const char* call = "";

  // True if the op may wait for another call or rank. The caller excludes waits for events that the same call records.
  bool is_outer() const { return kind >= Kind::wait; }
};

constexpr size_t kNoRecord = SIZE_MAX;

}  // namespace

struct LoggedOps : std::enable_shared_from_this<LoggedOps> {
  std::vector<LoggedOp> ops;
  std::vector<int> milestones;  // all milestones, also `begin` and `end`
  cudaStream_t caller = nullptr;
  bool is_captured = false, is_marked = false;
  int64_t launches = 0;
  // For a graph that the application launches: milestones at its start and end, and the number of launches that have ended.
  int begin = Milestones::kNone, end = Milestones::kNone;
  int64_t landed = 0;
};

namespace {

struct LoggedCall {
  int64_t number;
  LogClock::time_point at;
  std::shared_ptr<LoggedOps> ops;
  int64_t times;  // The call is done after its ops have ended this many times. All launches of a graph share its ops.
  int end = Milestones::kNone;  // milestone after all ops of the call
  bool is_enqueuing = true;
};

// Computes which ops of a call are done, from the milestones of the call and the order of streams and events.
class CallSolver {
 public:
  CallSolver(const LoggedOps& log, int64_t times, const Milestones& milestones)
      : ops_(log.ops), done_(ops_.size()), records_(ops_.size()) {
    std::map<cudaEvent_t, size_t> last;
    for (size_t i = 0; i < ops_.size(); ++i) {
      const LoggedOp& op = ops_[i];
      Queue& queue = queue_of(op.stream);
      queue.ops.push_back(i);
      if (op.milestone != Milestones::kNone && milestones.is_done(op.milestone, times)) queue.at = queue.ops.size();
      if (op.kind == Kind::record) last[op.event] = i;
      const auto found = op.kind == Kind::wait ? last.find(op.event) : last.end();
      records_[i] = found != last.end() ? found->second : kNoRecord;
    }
    for (Queue& queue : queues) {
      for (size_t n = 0; n < queue.at; ++n) done_[queue.ops[n]] = true;
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (Queue& queue : queues) {
        for (; queue.at < queue.ops.size() && passes(queue.ops[queue.at]); ++queue.at, moved = true)
          done_[queue.ops[queue.at]] = true;
      }
    }
  }

  struct Queue {
    cudaStream_t stream;
    std::vector<size_t> ops;
    size_t at = 0;  // index of the first op that is not done
  };
  std::vector<Queue> queues;

  // Index of the record op whose event op i waits for, or kNoRecord.
  size_t record_of(size_t i) const { return records_[i]; }
  bool is_done(size_t i) const { return done_[i]; }

 private:
  Queue& queue_of(cudaStream_t stream) {
    const auto found = std::ranges::find(queues, stream, &Queue::stream);
    return found != queues.end() ? *found : queues.emplace_back(Queue{stream, {}, 0});
  }

  // True if an op without a milestone counts as done, given that all earlier ops on its stream are done. Work counts as done,
  // because it does not wait for another call or rank.
  bool passes(size_t i) const {
    if (ops_[i].milestone != Milestones::kNone) return false;
    if (records_[i] != kNoRecord) return done_[records_[i]];
    return !ops_[i].is_outer();
  }

  const std::vector<LoggedOp>& ops_;
  std::vector<bool> done_;
  std::vector<size_t> records_;
};

}  // namespace

struct CallLog::Calls {
  mutable std::mutex mutex;  // guards the members from `calls` to `names`, and the logged ops
  Milestones milestones;
  std::deque<LoggedCall> calls;  // calls that may be unfinished
  int64_t made = 0, done = 0;
  std::vector<std::shared_ptr<LoggedOps>> of_application;  // ops of graphs that the application may launch at any time
  int64_t launched = 0, landed = 0;                        // graph launches by the application: begun, and ended
  std::map<cudaStream_t, std::string> names;

  // Only the thread that makes calls uses these members.
  std::shared_ptr<LoggedOps> adding;
  std::vector<std::shared_ptr<LoggedOps>> of_graphs;
  std::vector<LoggedOp> noted;  // ops of the current line of program.cpp
  std::optional<cudaStream_t> stream;
  const Channel* channel = nullptr;
  std::vector<int> peers;
  int groups = 0;
  bool in_group = false;
  std::vector<cudaEvent_t> recorded;

  void next_line() {
    noted.clear();
    peers.clear();
    stream.reset();
    channel = nullptr;
  }

  // Logs the rest of a line: transfers if the line has peers, otherwise a collective if the line has a channel, otherwise work if
  // nothing is logged yet.
  void note_rest() {
    LoggedOp op{.stream = stream.value_or(adding->caller), .channel = channel};
    if (!peers.empty()) {
      for (const int peer : peers) {
        op.kind = Kind::transfer;
        op.peer = channel->world_rank(peer);
        noted.push_back(op);
      }
    } else if (channel || noted.empty()) {
      op.kind = channel ? Kind::collective : Kind::work;
      noted.push_back(op);
    }
  }

  // True if the op needs a milestone after it.
  bool has_milestone(const LoggedOp& op) {
    if (op.kind == Kind::record) recorded.push_back(op.event);
    return op.is_outer() && (op.kind != Kind::wait || std::ranges::find(recorded, op.event) == recorded.end());
  }

  int milestone(cudaStream_t on) {
    if (adding->is_captured && !adding->is_marked) return Milestones::kNone;
    const int milestone = milestones.set(on, adding->is_captured);
    if (milestone != Milestones::kNone) adding->milestones.push_back(milestone);
    return milestone;
  }

  void give_back(const LoggedOps& ops) {
    for (const int milestone : ops.milestones) milestones.give_back(milestone);
  }

  // Forgets the calls that are done, and counts the launches by the application.
  void advance() {
    const BesideCaptures beside;
    while (!calls.empty() && !calls.front().is_enqueuing && milestones.is_done(calls.front().end, 1)) {
      const LoggedCall& call = calls.front();
      done = call.number;
      milestones.give_back(call.end);
      if (call.ops && !call.ops->is_captured) give_back(*call.ops);
      calls.pop_front();
    }
    for (const auto& ops : of_application) {
      for (; milestones.is_done(ops->begin, ops->launches + 1); ++launched) ++ops->launches;
      for (; milestones.is_done(ops->end, ops->landed + 1); ++landed) ++ops->landed;
    }
  }

  // Returns an unfinished launch by the application, if there is one: all calls before this launch are done. Otherwise returns
  // the first unfinished call.
  std::optional<LoggedCall> unfinished() const {
    for (const auto& ops : of_application) {
      if (ops->launches > ops->landed)
        return LoggedCall{.number = 0, .at = {}, .ops = ops, .times = ops->launches, .is_enqueuing = false};
    }
    return calls.empty() ? std::nullopt : std::optional(calls.front());
  }

  std::string name_of(cudaStream_t one, const LoggedOps& of) const {
    const auto found = names.find(one);
    return one == of.caller || found == names.end() ? "caller" : found->second;
  }

  Standstill::Stream describe(const LoggedCall& call, const CallSolver& solver, const CallSolver::Queue& queue) const;
};

CallLog::CallLog() = default;

constinit thread_local CallLog* CallLog::current_ = nullptr;

// --- calls

void CallLog::begin_call() {
  const std::lock_guard lock(calls_->mutex);
  calls_->advance();
  calls_->calls.push_back({.number = ++calls_->made, .at = LogClock::now(), .ops = nullptr, .times = 1});
}

void CallLog::end_call(cudaStream_t caller) {
  const int milestone = calls_->milestones.set(caller, false);
  const std::lock_guard lock(calls_->mutex);
  calls_->calls.back().end = milestone;
  calls_->calls.back().is_enqueuing = false;
}

void CallLog::launches(LoggedOps* ops) {
  const std::lock_guard lock(calls_->mutex);
  calls_->calls.back().ops = ops->shared_from_this();
  calls_->calls.back().times = ++ops->launches;
}

CallLog::Adding::Adding(CallLog& log, cudaStream_t caller, bool is_marked) {
  Calls& calls = *log.calls_;
  calls.adding = std::make_shared<LoggedOps>();
  calls.adding->caller = caller;
  calls.recorded.clear();
  calls.in_group = false;
  calls.next_line();
  const std::lock_guard lock(calls.mutex);
  if (!calls.calls.empty() && calls.calls.back().is_enqueuing) {
    calls.calls.back().ops = calls.adding;
  } else {
    calls.adding->is_captured = true;
    calls.adding->is_marked = is_marked;
  }
  current_ = &log;
}

CallLog::Adding::~Adding() { current_ = nullptr; }

bool CallLog::prepare_capture(bool wanted) { return calls_->milestones.prepare_capture(wanted); }

void CallLog::begins_launch() { calls_->adding->begin = calls_->milestone(calls_->adding->caller); }

void CallLog::ends_launch() {
  calls_->adding->end = calls_->milestone(calls_->adding->caller);
  if (calls_->adding->end == Milestones::kNone) return;
  const std::lock_guard lock(calls_->mutex);
  calls_->of_application.push_back(calls_->adding);
}

LoggedOps* CallLog::captured() {
  const std::lock_guard lock(calls_->mutex);
  calls_->of_graphs.push_back(calls_->adding);
  return calls_->adding.get();
}

void CallLog::forget(LoggedOps* ops) {
  const std::lock_guard lock(calls_->mutex);
  calls_->advance();
  calls_->give_back(*ops);
  ops->ops.clear();  // Unfinished launches remain calls without lines.
  std::erase_if(calls_->of_graphs, [ops](const auto& own) { return own.get() == ops; });
}

// --- lines

void CallLog::on(cudaStream_t stream, const char* name, int index) {
  calls_->stream = stream;
  if (!name || calls_->names.contains(stream)) return;
  const std::lock_guard lock(calls_->mutex);
  calls_->names[stream] = std::string(name) + "[" + std::to_string(index) + "]";
}

void CallLog::over(const Channel& channel) { calls_->channel = &channel; }

void CallLog::with_peer(int peer) { calls_->peers.push_back(peer); }

void CallLog::records(cudaEvent_t event, cudaStream_t stream) {
  calls_->noted.push_back({.kind = Kind::record, .stream = stream, .event = event});
}

void CallLog::awaits(cudaEvent_t event, cudaStream_t stream) {
  calls_->noted.push_back({.kind = Kind::wait, .stream = stream, .event = event});
}

void CallLog::gives_signal(const Channel& channel, int64_t peer, int number, cudaStream_t stream) {
  const int rank = static_cast<int>(channel.world_rank(peer));
  calls_->noted.push_back({.kind = Kind::signal, .stream = stream, .channel = &channel, .peer = rank, .number = number});
}

void CallLog::awaits_signal(const Channel& channel, int64_t peer, int number, cudaStream_t stream) {
  const int rank = static_cast<int>(channel.world_rank(peer));
  calls_->noted.push_back({.kind = Kind::wait_signal, .stream = stream, .channel = &channel, .peer = rank, .number = number});
}

// NCCL begins the calls of a group together. So the group needs only one milestone per stream.
void CallLog::end_group() {
  calls_->in_group = false;
  std::map<cudaStream_t, int> milestones;
  std::vector<LoggedOp>& ops = calls_->adding->ops;
  for (size_t i = ops.size(); i-- > 0 && ops[i].group == calls_->groups;) {
    if (!milestones.contains(ops[i].stream)) milestones[ops[i].stream] = calls_->milestone(ops[i].stream);
    const std::lock_guard lock(calls_->mutex);
    ops[i].milestone = milestones[ops[i].stream];
  }
}

void CallLog::line(const char* call, const char* file, int number) {
  if (std::strcmp(file, "program.cpp") != 0) return;
  Calls& calls = *calls_;
  if (std::strcmp(call, "ncclGroupStart()") == 0) {
    ++calls.groups;
    calls.in_group = true;
    return;
  }
  if (std::strcmp(call, "ncclGroupEnd()") == 0) return end_group();
  calls.note_rest();
  for (LoggedOp& op : calls.noted) {
    op.line = number;
    op.call = call;
    if (calls.in_group && op.kind >= Kind::transfer) {
      op.group = calls.groups;
    } else if (calls.has_milestone(op)) {
      op.milestone = calls.milestone(op.stream);
    }
  }
  const std::lock_guard lock(calls.mutex);
  calls.adding->ops.insert(calls.adding->ops.end(), calls.noted.begin(), calls.noted.end());
  calls.next_line();
}

// --- reports of the state

CallLog::State CallLog::state() {
  const std::lock_guard lock(calls_->mutex);
  calls_->advance();
  State state{calls_->made + calls_->launched, calls_->done + calls_->landed, 0};
  if (!calls_->calls.empty())
    state.waiting_seconds = std::chrono::duration<double>(LogClock::now() - calls_->calls.front().at).count();
  return state;
}

Standstill::Stream CallLog::Calls::describe(const LoggedCall& call, const CallSolver& solver,
                                            const CallSolver::Queue& queue) const {
  const std::vector<LoggedOp>& ops = call.ops->ops;
  const auto line_of = [&](size_t i) { return Standstill::Line{ops[i].line, ops[i].call}; };
  const size_t next = queue.ops[queue.at];
  const LoggedOp& op = ops[next];
  Standstill::Stream stream{.name = name_of(queue.stream, *call.ops),
                            .next = line_of(next),
                            .behind = static_cast<int64_t>(queue.ops.size() - queue.at) - 1,
                            .number = op.number};
  if (queue.at > 0) stream.done = line_of(queue.ops[queue.at - 1]);
  if (op.channel) stream.channel = op.channel->name();
  const auto collectives = [&](const LoggedOp& one) { return one.kind == Kind::collective && one.channel == op.channel; };
  switch (op.kind) {
    case Kind::work:
    case Kind::record:
      break;
    case Kind::wait:
      stream.edge = Standstill::Edge::call_before;
      if (const size_t record = solver.record_of(next); record != kNoRecord) {
        stream.edge = Standstill::Edge::event;
        stream.from = line_of(record);
        stream.from_stream = name_of(ops[record].stream, *call.ops);
      }
      break;
    case Kind::signal:
    case Kind::wait_signal:
      stream.edge = op.kind == Kind::signal ? Standstill::Edge::credit : Standstill::Edge::signal;
      stream.ranks = {op.peer};
      break;
    case Kind::transfer:
      stream.edge = Standstill::Edge::transfer;
      for (const size_t i : queue.ops) {
        const bool begins = i == next || (op.group != 0 && ops[i].group == op.group);
        if (begins && std::ranges::find(stream.ranks, ops[i].peer) == stream.ranks.end()) stream.ranks.push_back(ops[i].peer);
      }
      break;
    case Kind::collective:
      stream.edge = Standstill::Edge::collective;
      stream.ranks = op.channel->ranks();
      stream.nth = std::count_if(ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(next) + 1, collectives);
      break;
  }
  if (call.ops->is_captured && op.is_outer() && op.milestone == Milestones::kNone && stream.edge != Standstill::Edge::event)
    stream.edge = Standstill::Edge::unknown;
  return stream;
}

void CallLog::look(Standstill& standstill) {
  const std::lock_guard lock(calls_->mutex);
  calls_->advance();
  const std::optional<LoggedCall> found = calls_->unfinished();
  if (!found) return;
  const LoggedCall& call = *found;
  standstill.call = calls_->done + calls_->landed + 1;
  standstill.is_enqueuing = call.is_enqueuing;
  if (!call.ops) return;
  standstill.is_graph = call.ops->is_captured;
  const std::vector<LoggedOp>& ops = call.ops->ops;
  if (!ops.empty()) standstill.enqueued = {ops.back().line, ops.back().call};
  const BesideCaptures beside;
  const CallSolver solver(*call.ops, call.times, calls_->milestones);
  std::map<const Channel*, int64_t> begun;
  std::vector<bool> is_next(ops.size());
  for (const CallSolver::Queue& queue : solver.queues) {
    if (queue.at == queue.ops.size()) {
      standstill.finished.push_back(calls_->name_of(queue.stream, *call.ops));
      continue;
    }
    standstill.streams.push_back(calls_->describe(call, solver, queue));
    for (size_t n = queue.at; n < queue.ops.size(); ++n) {
      const size_t i = queue.ops[n], first = queue.ops[queue.at];
      is_next[i] = i == first || (ops[first].group != 0 && ops[i].group == ops[first].group);
    }
  }
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].kind == Kind::collective) begun[ops[i].channel] += solver.is_done(i) || is_next[i];
  }
  for (const auto& [channel, count] : begun) standstill.begun.emplace_back(channel->name(), channel->ranks(), count);
}

}  // namespace hw
