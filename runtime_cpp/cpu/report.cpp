// Texts of reports about ops, conflicts and deadlocks.
#include <cstring>
#include <set>
#include <utility>

#include "communicator.h"
#include "machine.h"

namespace hostweave::cpu {
namespace {

std::string location_text(const Location& location) {
  if (!location.file) return "";
  const std::string file = location.file;
  return " (" + file.substr(file.rfind('/') + 1) + ":" + std::to_string(location.line) + ")";
}

// Argument n of a call in source text, counted from 0. Argument 1 of "f(a, g(b, c), d)" is "g(b, c)".
std::string argument(const char* call, int n) {
  if (!call || n < 0) return "";
  const char* at = std::strchr(call, '(');
  if (!at) return "";
  std::string text;
  int depth = 0;
  for (++at; *at; ++at) {
    if (*at == '(' || *at == '[' || *at == '{') ++depth;
    if (*at == ')' || *at == ']' || *at == '}') {
      if (--depth < 0) break;
    }
    if (*at == ',' && depth == 0) {
      if (n-- == 0) break;
      continue;
    }
    if (n == 0 && (*at != ' ' || !text.empty())) text += *at;
  }
  return n <= 0 ? text : "";
}

std::string list(const std::set<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  bool first = true;
  for (const int rank : ranks) {
    if (!std::exchange(first, false)) text += ", ";
    text += std::to_string(rank);
  }
  return text;
}

std::string who(const OpName& name) { return "rank " + std::to_string(name.device) + " stream " + std::to_string(name.stream); }

std::string what_it_waits_for(const Op& op) {
  if (!op.begun) {
    for (const OpPtr& before : op.after) {
      if (!before->done) return "waits for " + before->name.text();
    }
    for (const SignalTurn& turn : op.awaits) {
      if (turn.count->value < turn.number) return "waits for a signal of rank " + std::to_string(turn.count->sender);
    }
    return "is ready";
  }
  std::set<int> ranks;
  for (const Part& part : op.parts) {
    if (part.match->satisfied(part.index)) continue;
    for (std::size_t seat = 0; seat < part.match->seats.size(); ++seat) {
      if (!part.match->seats[seat].begun) ranks.insert(part.match->seat_ranks[seat]);
    }
  }
  return ranks.empty() ? "is in flight" : "waits for " + list(ranks);
}

}  // namespace

std::string OpName::text() const { return who(*this) + ": " + what(); }

std::string OpName::what() const {
  std::string text = kind;
  const std::string of = argument(location.call, subject);
  if (!of.empty() && of.size() < 60) text += " " + of;
  if (*process_group) text += std::string(" over ") + process_group;
  return text + location_text(location);
}

std::string Machine::deadlock_report() {
  std::string text = "deadlock: no rank can continue";
  for (const auto& streams : by_device_) {
    for (const Stream* stream : streams) {
      if (stream->queue.empty()) continue;
      const Op& head = *stream->queue.front();
      text += "\n  " + head.name.text() + " " + what_it_waits_for(head);
      const size_t more = stream->queue.size() - 1;
      if (more) text += ", with " + std::to_string(more) + " operation" + (more > 1 ? "s" : "") + " behind it";
      const OpName& done = stream->last_done;
      if (done.location.file == head.name.location.file && done.location.file) text += "; done up to " + done.what();
    }
  }
  std::vector<HostThread*> hosts = attached_;
  for (HostThread* thread : waiting_) {
    if (!thread->attached) hosts.push_back(thread);
  }
  for (const HostThread* thread : hosts) {
    text += "\n  host of rank " + std::to_string(thread->device);
    text += thread->waiting ? " waits for " + thread->waits_for : " runs outside the device";
    text += location_text(thread->location);
  }
  return text;
}

std::string Machine::no_progress_report() {
  return deadlock_report() + "\n  (no progress for " + std::to_string(config.timeout_seconds) + " seconds)";
}

std::string Machine::conflict_report(const History::Conflict& conflict, const OpName& name) const {
  const Range& range = conflict.range;
  std::string text = "missing dependency: nothing orders\n  ";
  text += conflict.earlier.name.text() + (conflict.earlier_writes ? ", which writes" : ", which reads") + ", before\n  ";
  text += name.text() + (range.write ? ", which writes " : ", which reads ");
  if (const Allocation* allocation = memory.find(range.begin)) {
    text += "bytes " + std::to_string(range.begin - allocation->begin) + " to " + std::to_string(range.end() - allocation->begin);
    text += " of an allocation of " + std::to_string(allocation->bytes) + " bytes of ";
    text += allocation->device == kHost ? "the host" : "rank " + std::to_string(allocation->device);
  } else {
    text += std::to_string(range.end() - range.begin) + " bytes of host memory";
  }
  return text;
}

}  // namespace hostweave::cpu
