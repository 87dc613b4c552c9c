#include "machine.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "communicator.h"

namespace hostweave::cpu {

HostThread& this_thread() {
  struct Owner {
    HostThread thread;
    ~Owner() {
      if (!thread.attached) return;
      Lock lock(Machine::get().mutex);
      Machine::get().detach(lock);
    }
  };
  thread_local Owner owner;
  return owner.thread;
}

// The machine is never destroyed, because workers and static objects may still use the machine at exit.
Machine& Machine::get() {
  static Machine* const machine = new Machine;
  return *machine;
}

Machine::Machine() {
  const Lock lock(mutex);
  configure(config);
}

const char* Machine::configure(const hw_cpu_config& wanted) {
  if (wanted.mode != HW_CPU_PARALLEL && wanted.mode != HW_CPU_SEEDED) return "mode: neither parallel nor seeded";
  if (wanted.picker < HW_CPU_MIXED || wanted.picker > HW_CPU_HOSTS) return "picker: unknown";
  if (wanted.devices < 1) return "devices: at least 1";
  if (!(wanted.timeout_seconds > 0)) return "timeout_seconds: more than 0";
  if (wanted.processes && wanted.mode == HW_CPU_SEEDED) return "mode: seeded is for ranks that are threads of one process";
  if (!attached_.empty()) return "a rank thread is still attached";
  const auto is_queued = [](const auto& entry) { return !entry.second->queue.empty(); };
  if (running_ != 0 || std::ranges::any_of(streams_, is_queued)) return "work is still queued; synchronise first";
  stop_workers();
  barrier = {};
  config = wanted;
  picker.emplace(config.seed, config.picker);
  const auto by_seed = [&](int setting, bool parallel, int bit) {
    return setting >= 0 ? setting != 0 : (seeded() ? picker->coin(bit) : parallel);
  };
  ordered_launches_ = by_seed(config.ordered_launches, true, 0);
  buffered_sends_ = by_seed(config.buffered_sends, false, 1);
  checking_ = config.check_dependencies >= 0 ? config.check_dependencies != 0 : seeded();
  failed_ = false;
  report_.clear();
  ops_done_ = progress_ = 0;
  arrived_ = 0;
  round_started_ = false;
  history.clear();
  posted_.clear();
  for (auto& [stream, owner] : streams_) stream->rank_in_picker = 0;
  if (seeded()) return nullptr;
  try {
    start_workers();
  } catch (const std::system_error&) {  // A worker could not start. Stops the other workers.
    stop_workers();
    throw;
  }
  return nullptr;
}

void Machine::fail(std::string report) {
  if (failed_) return;
  failed_ = true;
  report_ = std::move(report);
  for (const auto& known : process_groups) {
    if (const auto process_group = known.lock(); process_group && !process_group->in_step()) process_group->stopped = true;
  }
  drop_queues();
  for (HostThread* thread : attached_) thread->wake.notify_all();
  for (HostThread* thread : waiting_) thread->wake.notify_all();
  turn_free_.notify_all();
  workers_idle_.notify_all();
}

void Machine::drop_queues() {
  ready_.clear();
  std::vector<Stream*> all;
  for (auto& [stream, owner] : streams_) all.push_back(stream);
  for (Stream* stream : all) {
    for (const OpPtr& op : stream->queue) {
      op->done = true;
      op->after.clear();
      op->waiters.clear();
      for (const SignalTurn& turn : op->awaits) turn.count->waiters.clear();
    }
    stream->queue.clear();
    stream->scheduled = false;
    stream->blocked_on = nullptr;
    if (stream->destroyed) retire(*stream);
  }
}

// --- streams

std::size_t Machine::new_actor() {
  if (free_actors_.empty()) return actors_++;
  const std::size_t actor = free_actors_.back();
  free_actors_.pop_back();
  return actor;
}

Stream& Machine::new_stream(int device, int number) {
  auto owner = std::make_unique<Stream>();
  Stream& stream = *owner;
  stream.device = device;
  stream.number = number;
  stream.actor = new_actor();
  streams_.emplace(&stream, std::move(owner));
  by_device_[device].push_back(&stream);
  return stream;
}

Stream* Machine::create_stream(unsigned flags) {
  const int device = this_thread().device;
  legacy_stream(device);
  int number = 1;
  while (std::ranges::count(by_device_[device], number, &Stream::number) != 0) ++number;
  Stream& stream = new_stream(device, number);
  stream.flags = flags;
  stream.clock.join(*host_clock(device));
  ++live_streams_;
  return &stream;
}

Stream& Machine::legacy_stream(int device) {
  if (by_device_.size() <= static_cast<std::size_t>(device)) by_device_.resize(device + 1);
  return by_device_[device].empty() ? new_stream(device, 0) : *by_device_[device].front();
}

Stream* Machine::find_stream(cudaStream_t handle, int device) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &legacy_stream(device);
  Stream* const stream = reinterpret_cast<Stream*>(handle);
  return streams_.count(stream) != 0 && !stream->destroyed ? stream : nullptr;
}

void Machine::destroy_stream(Stream* stream) {
  stream->destroyed = true;
  --live_streams_;
  if (stream->queue.empty() && !stream->scheduled) retire(*stream);
}

void Machine::retire(Stream& stream) {
  std::erase(by_device_[stream.device], &stream);
  host_side(stream.device).retired.join(stream.clock);
  free_actors_.push_back(stream.actor);
  std::erase_if(posted_[stream.device], [&](const auto& entry) { return entry.first.second == stream.actor; });
  streams_.erase(&stream);
}

std::vector<OpPtr> Machine::tails(int device) {
  legacy_stream(device);
  std::vector<OpPtr> tails;
  for (Stream* stream : by_device_[device]) {
    if (stream->last) tails.push_back(stream->last);
  }
  return tails;
}

// --- clocks of the hosts

Machine::HostSide& Machine::host_side(int device) {
  auto it = hosts_.find(device);
  if (it == hosts_.end()) it = hosts_.emplace(device, HostSide{new_actor(), std::make_shared<Clock>(), {}}).first;
  return it->second;
}

void Machine::learn(int device, const ClockSnapshot& clock) {
  if (!checking_ || !clock) return;
  ClockSnapshot& known = host_clock(device);
  auto joined = std::make_shared<Clock>(*known);
  joined->join(*clock);
  known = std::move(joined);
}

std::optional<std::string> Machine::illegal_access(const Ranges& ranges, int device, bool peers_allowed) {
  for (const Range& range : ranges) {
    if (range.empty()) continue;
    if (range.begin == 0) return "a null pointer";
    const Allocation* const allocation = memory.find(range.begin);
    if (!allocation) continue;  // This is ordinary memory. A program may pass ordinary memory as memory of any device.
    if (range.end() > allocation->begin + allocation->bytes) {
      return "bytes " + std::to_string(range.begin - allocation->begin) + " to " +
             std::to_string(range.end() - allocation->begin) + " of an allocation of " + std::to_string(allocation->bytes);
    }
    if (allocation->device != device && allocation->device != kHost && !peers_allowed &&
        !peer_access.contains({device, allocation->device})) {
      return "memory of device " + std::to_string(allocation->device) + " in an op of device " + std::to_string(device);
    }
  }
  return std::nullopt;
}

void Machine::learn_retired(int device) {
  if (checking_) learn(this_thread().device, std::make_shared<Clock>(host_side(device).retired));
}

// --- op execution

void Machine::enqueue(Lock& lock, OpPtr op, Stream& stream) {
  HostThread& thread = this_thread();
  op->stream = &stream;
  op->name.device = stream.device;
  op->name.stream = stream.number;
  op->name.location = thread.location;
  if (checking_) op->host_clock = host_clock(thread.device);
  const auto order_after = [&](const Stream& other) {
    if (other.last && (checking_ || !other.last->done)) op->after.push_back(other.last);
  };
  if (stream.legacy()) {
    for (const Stream* other : by_device_[stream.device]) {
      if (!other->legacy() && other->blocking()) order_after(*other);
    }
  } else if (stream.blocking()) {
    order_after(*by_device_[stream.device].front());
  }
  stream.last = op;
  stream.queue.push_back(std::move(op));
  if (stream.queue.size() == 1) evaluate(stream);
  scheduling_point(lock);
}

void Machine::evaluate(Stream& stream) {
  if (stream.scheduled || stream.queue.empty()) return;
  const Op& op = *stream.queue.front();
  if (!op.begun) {
    for (const OpPtr& before : op.after) {
      if (before->done) continue;
      if (stream.blocked_on != before.get()) {
        stream.blocked_on = before.get();
        before->waiters.push_back(&stream);
      }
      return;
    }
    for (const SignalTurn& turn : op.awaits) {
      if (turn.count->value >= turn.number) continue;
      std::vector<Stream*>& waiters = turn.count->waiters;
      if (std::find(waiters.begin(), waiters.end(), &stream) == waiters.end()) waiters.push_back(&stream);
      return;
    }
  } else {
    for (const Part& part : op.parts) {
      if (!part.match->satisfied(part.index)) return;
    }
  }
  stream.scheduled = true;
  ready_.push_back(&stream);
  if (!seeded() && idle_workers_ > 0) workers_wake_.notify_one();
}

// Makes one step of a stream that the caller has removed from the ready list.
void Machine::advance(Lock& lock, Stream& stream) {
  const OpPtr op = stream.queue.front();
  const auto wait_in_flight = [&] {
    stream.scheduled = false;
    evaluate(stream);
  };
  if (!op->begun) {
    begin(stream, *op);
    if (failed_) return;
    if (!op->parts.empty() || (seeded() && op->work)) return wait_in_flight();
  }
  if (op->work) {
    ++running_;
    lock.unlock();
    std::string problem;
    try {
      op->work();
    } catch (const std::exception& error) {  // thrown by a kernel
      problem = error.what();
    }
    lock.lock();
    --running_;
    if (!problem.empty()) fail(op->name.text() + ": " + problem);
  }
  for (const Part& part : op->parts) {
    Match& match = *part.match;
    const bool left_in_buffer = match.kind == CommKind::send_recv && match.buffered && part.index == 0;
    if (!left_in_buffer && match.state == Match::State::open) transfer(lock, match);
  }
  if (failed_) {  // The failure has discarded the queues, and perhaps the stream.
    workers_idle_.notify_all();
    return;
  }
  // Another rank may still execute one of the transfers of the op. Then the op waits for that transfer.
  for (const Part& part : op->parts) {
    if (!part.match->satisfied(part.index)) return wait_in_flight();
  }
  end(stream, *op);
  stream.scheduled = false;
  if (stream.destroyed && stream.queue.empty()) {
    retire(stream);
  } else {
    evaluate(stream);
  }
}

void Machine::begin(Stream& stream, Op& op) {
  op.begun = true;
  if (checking_) {
    if (op.host_clock) stream.clock.join(*op.host_clock);
    for (const OpPtr& before : op.after) {
      if (before->clock) stream.clock.join(*before->clock);
    }
    for (const SignalTurn& turn : op.awaits) {
      const auto reached = turn.count->clocks.lower_bound(turn.number);
      if (reached != turn.count->clocks.end()) stream.clock.join(*reached->second);
    }
    const std::uint32_t epoch = stream.clock.tick(stream.actor);
    if (const auto conflict = history.note(op.ranges, {stream.actor, epoch, op.name}, stream.clock)) {
      const bool ours = memory.find(conflict->range.begin) != nullptr;
      // Accesses of two ranks to ordinary host memory are no conflict. malloc may give the same memory to one rank after the
      // other.
      if (ours || conflict->earlier.name.device == stream.device) {
        fail(conflict_report(*conflict, op.name));
        return;
      }
    }
    if (const auto earlier = over_another_channel(stream, op, epoch)) {
      fail("missing dependency: nothing orders two communications of a rank over different channels, which can deadlock:\n  " +
           earlier->text() + " and\n  " + op.name.text());
      return;
    }
  }
  op.after.clear();
  if (seeded()) poison(op);
  take_seats(stream, op);
}

// Records a communication. Returns an earlier communication over another channel if the two are unordered. Unordered
// communications can deadlock: NCCL may start them in different orders on different ranks, and a waiting communication occupies
// its device.
std::optional<OpName> Machine::over_another_channel(const Stream& stream, const Op& op, std::uint32_t epoch) {
  std::optional<OpName> found;
  auto& posted = posted_[stream.device];
  for (const Part& part : op.parts) {
    if (!part.match->is_shared()) continue;
    for (const auto& [where, access] : posted) {
      const auto& [process_group, actor] = where;
      if (!found && process_group != part.match->process_group && actor != stream.actor && stream.clock.at(actor) < access.epoch)
        found = access.name;
    }
    posted.insert_or_assign({part.match->process_group, stream.actor}, History::Access{stream.actor, epoch, op.name});
  }
  return found;
}

// Fills outputs with 0xff bytes, which are NaN in every float type. So a premature read does not find results of an earlier call.
void Machine::poison(const Op& op) {
  for (const Range& range : op.ranges) {
    if (!range.write || range.scratch) continue;
    for (std::size_t row = 0; row < (range.empty() ? 0 : range.rows); ++row) {
      std::uintptr_t at = range.begin + row * range.pitch;
      const std::uintptr_t end = at + range.bytes;
      while (at < end) {  // Bytes that the op also reads stay unchanged.
        std::uintptr_t stop = end, next = end;
        for (const Range& input : op.ranges) {
          if (input.write || input.empty() || input.end() <= at || input.begin >= stop) continue;
          stop = std::max(input.begin, at);
          next = input.end();
        }
        std::memset(reinterpret_cast<void*>(at), 0xff, stop - at);
        at = std::max(next, stop);
        if (stop == end) break;
      }
    }
  }
}

void Machine::take_seats(Stream& stream, Op& op) {
  for (const Part& part : op.parts) {
    Match& match = *part.match;
    Match::Seat& seat = match.seats[part.index];
    seat.begun = true;
    if (checking_) seat.clock = std::make_shared<Clock>(stream.clock);
    ++match.begun;
    if (match.buffered && part.index == 0) {
      const auto* const bytes = static_cast<const std::byte*>(seat.send);
      match.buffer.assign(bytes, bytes + match.bytes());
    }
  }
  for (const Part& part : op.parts) {
    if (!part.match->complete()) continue;
    for (const Match::Seat& seat : part.match->seats) {
      if (seat.stream && seat.stream != &stream) evaluate(*seat.stream);
    }
  }
}

void Machine::transfer(Lock& lock, Match& match) {
  match.state = Match::State::running;
  ++running_;
  lock.unlock();
  match.transfer();
  lock.lock();
  --running_;
  match.state = Match::State::done;
  if (failed_) return;
  for (const Match::Seat& seat : match.seats) {
    if (seat.stream) evaluate(*seat.stream);
  }
}

void Machine::end(Stream& stream, Op& op) {
  if (checking_) {
    for (const Part& part : op.parts) {
      for (const Match::Seat& seat : part.match->seats) {
        const int from = static_cast<int>(&seat - part.match->seats.data());
        if (from != part.index && seat.clock && part.match->data_flows(from, part.index)) stream.clock.join(*seat.clock);
      }
    }
    op.clock = std::make_shared<Clock>(stream.clock);
  }
  // Other ops may keep a Match alive. A Match must not refer to a destroyed stream.
  for (const Part& part : op.parts) part.match->seats[part.index].stream = nullptr;
  for (const SignalTurn& turn : op.gives) {
    SignalCount& count = *turn.count;
    if (turn.number <= count.value) continue;  // A later signal has already arrived.
    count.value = turn.number;
    if (checking_) count.clocks[turn.number] = op.clock;
    for (Stream* waiter : std::exchange(count.waiters, {})) evaluate(*waiter);
  }
  for (std::uint64_t* mark : op.marks) std::atomic_ref(*mark).fetch_add(1);
  op.finished = std::chrono::steady_clock::now();
  stream.last_done = op.name;
  op.done = true;
  op.parts.clear();
  op.work = nullptr;
  stream.queue.pop_front();
  for (Stream* waiter : std::exchange(op.waiters, {})) {
    waiter->blocked_on = nullptr;
    evaluate(*waiter);
  }
  ++ops_done_;
  progress();
}

}  // namespace hostweave::cpu
