// Seeded mode: one step at a time. Only the thread that has the turn runs. When this thread waits, the picker chooses a runnable
// thread or stream. For a stream, the waiting thread executes one step of the stream, and the picker chooses again. For a thread,
// the waiting thread passes the turn to that thread.
#include <algorithm>
#include <chrono>

#include "machine.h"

namespace hostweave::cpu {

std::vector<Candidate> Machine::choices(HostThread* me) {
  std::vector<Candidate> all;
  for (HostThread* thread : attached_) {
    if (thread->waiting && thread->ready && thread->ready()) all.push_back({thread, nullptr, thread->rank, 0, &thread->priority});
  }
  if (me && !me->attached && me->ready()) all.push_back({me, nullptr, -1, 0, &me->priority});
  for (Stream* stream : ready_) all.push_back({nullptr, stream, stream->device, stream->number, &stream->rank_in_picker});
  return all;
}

void Machine::step(Lock& lock, Stream* stream) {
  std::erase(ready_, stream);
  advance(lock, *stream);
}

void Machine::hand_turn(HostThread* thread) {
  turn_ = thread;
  if (thread) thread->wake.notify_one();
  turn_free_.notify_all();
}

std::chrono::steady_clock::time_point Machine::deadline() const {
  using Clock = std::chrono::steady_clock;
  const double seconds = std::min(config.timeout_seconds, 1e8);  // Longer times exceed the range of clocks.
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Waits for the turn. The wait has a timeout, because the thread with the turn may be blocked outside the device.
void Machine::await_turn(Lock& lock, HostThread& me) {
  auto end = deadline();
  std::uint64_t seen = picker->steps();
  while (!failed_ && turn_ != &me) {
    if (me.wake.wait_until(lock, end) == std::cv_status::no_timeout || failed_ || turn_ == &me) continue;
    if (seen == picker->steps() && running_ == 0 && turn_ && !turn_->inside) {
      fail("rank " + std::to_string(turn_->rank) + " has the turn, but has not called the device for " +
           std::to_string(config.timeout_seconds) +
           " seconds: in seeded mode a rank must not wait for another by means that the device cannot see\n" + deadlock_report());
    } else if (!turn_ && !round_started_) {
      fail("only " + std::to_string(arrived_) + " of " + std::to_string(expected_ranks()) + " rank threads attached in " +
           std::to_string(config.timeout_seconds) + " seconds");
    }
    seen = picker->steps();
    end = deadline();
  }
}

bool Machine::wait_seeded(Lock& lock, HostThread& me) {
  if (me.attached && turn_ != &me) {  // The thread has just attached, and is not the last one to attach.
    await_turn(lock, me);
    return !failed_;
  }
  while (!failed_) {
    const std::vector<Candidate> all = choices(&me);
    if (all.empty()) {
      if (me.attached) {
        fail(deadlock_report());
        return false;
      }
      // No thread or stream can run now. Another thread that is not attached may end this wait.
      hand_turn(nullptr);
      me.inside = false;
      waiting_.push_back(&me);
      const auto is_over = [&] { return failed_ || (turn_ == nullptr && attached_.empty() && (me.ready() || !ready_.empty())); };
      const auto progress = [&] { return picker->steps() + progress_; };
      std::uint64_t seen = progress();
      while (!turn_free_.wait_until(lock, deadline(), is_over)) {
        if (seen == progress() && running_ == 0) fail(no_progress_report());
        seen = progress();
      }
      me.inside = true;
      std::erase(waiting_, &me);
      if (failed_) return false;
      turn_ = &me;
      continue;
    }
    const Candidate& chosen = all[picker->pick(all)];
    if (chosen.stream) {
      step(lock, chosen.stream);
    } else if (chosen.host == &me) {
      return true;
    } else {
      hand_turn(chosen.host);
      await_turn(lock, me);
      return !failed_;
    }
  }
  return false;
}

// Passes the turn of a detaching thread to the next thread. First executes the steps of streams that the picker chooses.
void Machine::pass_turn_on(Lock& lock) {
  while (!failed_ && !attached_.empty()) {
    const std::vector<Candidate> all = choices(nullptr);
    if (all.empty()) return fail(deadlock_report());
    const Candidate& chosen = all[picker->pick(all)];
    if (chosen.host) return hand_turn(chosen.host);
    step(lock, chosen.stream);
  }
  hand_turn(nullptr);
}

bool Machine::wait(Lock& lock, std::string waits_for, std::function<bool()> ready) {
  HostThread& me = this_thread();
  me.waiting = true;
  me.waits_for = std::move(waits_for);
  me.ready = std::move(ready);
  const bool went_well = !failed_ && (seeded() ? wait_seeded(lock, me) : wait_parallel(lock, me));
  me.waiting = false;
  me.ready = nullptr;
  return went_well;
}

void Machine::scheduling_point(Lock& lock) {
  if (seeded() && !failed_) wait(lock, "its turn", [] { return true; });
}

void Machine::pause(Lock& lock) {
  if (!seeded()) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
    return;
  }
  picker->demote(this_thread().priority);
  scheduling_point(lock);
}

void Machine::wait_for_running_work(Lock& lock) {
  while (running_ != 0) workers_idle_.wait_for(lock, std::chrono::milliseconds(10));
}

void Machine::enter(Lock& lock) {
  HostThread& me = this_thread();
  if (seeded() && !me.attached && !failed_) {
    turn_free_.wait(lock, [&] { return failed_ || !seeded() || (turn_ == nullptr && attached_.empty()); });
    if (seeded() && !failed_) turn_ = &me;
  }
  me.inside = true;
}

void Machine::leave(Lock&) {
  HostThread& me = this_thread();
  me.inside = false;
  if (!me.attached && turn_ == &me) hand_turn(nullptr);
}

void Machine::attach(Lock& lock, int rank) {
  HostThread& me = this_thread();
  workers_idle_.wait(lock, [&] { return failed_ || !round_started_; });
  me.attached = true;
  me.rank = rank;
  me.device = rank;
  me.priority = 0;
  attached_.insert(std::ranges::upper_bound(attached_, rank, {}, &HostThread::rank), &me);
  round_started_ = ++arrived_ >= expected_ranks();
  if (!seeded() || failed_) return;
  if (round_started_) turn_ = &me;  // If this is the last thread to attach, the next line asks the picker for the first turn.
  wait(lock, "its first turn", [] { return true; });
}

void Machine::detach(Lock& lock) {
  HostThread& me = this_thread();
  me.attached = false;
  std::erase(attached_, &me);
  if (attached_.empty()) {
    round_started_ = false;
    arrived_ = 0;
    workers_idle_.notify_all();
  }
  if (seeded()) {
    pass_turn_on(lock);
  } else {
    find_deadlock();
  }
}

}  // namespace hostweave::cpu
