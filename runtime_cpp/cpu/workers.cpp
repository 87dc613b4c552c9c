// Parallel mode: a pool of worker threads runs the first op of each stream as soon as the op is ready.
#include <algorithm>
#include <exception>
#include <system_error>

#include "machine.h"

namespace hostweave::cpu {

void Machine::start_workers() {
  const std::size_t wanted = config.workers > 0 ? config.workers : std::max(std::thread::hardware_concurrency(), 1u);
  while (workers_.size() < wanted + blocked_workers_) workers_.emplace_back(&Machine::work, this);
}

Machine::Blocked::Blocked() {
  const Lock lock(get().mutex);
  ++get().blocked_workers_;
  try {
    get().start_workers();
  } catch (const std::system_error& error) {
    get().fail(std::string("cannot start a worker in place of one that waits for another process: ") + error.what());
  }
}

Machine::Blocked::~Blocked() {
  const Lock lock(get().mutex);
  --get().blocked_workers_;
}

void Machine::stop_workers() {
  stopping_ = true;
  workers_wake_.notify_all();
  mutex.unlock();
  workers_.clear();
  mutex.lock();
  stopping_ = false;
}

void Machine::work() {
  Lock lock(mutex);
  while (!stopping_) {
    if (!splits_.empty()) {
      run_split(lock, *splits_.front());
    } else if (!ready_.empty()) {
      Stream* const stream = ready_.front();
      ready_.erase(ready_.begin());
      advance(lock, *stream);
    } else {
      ++idle_workers_;
      if (running_ == 0) find_deadlock();
      workers_wake_.wait(lock, [&] { return stopping_ || !splits_.empty() || !ready_.empty(); });
      --idle_workers_;
    }
  }
}

void Machine::progress() {
  ++progress_;
  if (seeded()) {
    turn_free_.notify_all();
    return;
  }
  for (HostThread* thread : waiting_) {
    if (thread->ready()) thread->wake.notify_one();
  }
}

bool Machine::wait_parallel(Lock& lock, HostThread& me) {
  if (me.ready()) return true;
  waiting_.push_back(&me);
  find_deadlock();
  auto end = deadline();
  std::uint64_t seen = progress_;
  while (!failed_ && !me.ready()) {
    if (me.wake.wait_until(lock, end) == std::cv_status::no_timeout) continue;
    // There is no deadlock if work is running or some rank has made progress.
    if (seen == progress_ && running_ == 0 && ready_.empty() && !me.ready() && !failed_) {
      fail(no_progress_report());
    }
    seen = progress_;
    end = deadline();
  }
  std::erase(waiting_, &me);
  return !failed_;
}

// Reports a deadlock if every rank thread has attached, all attached threads wait, no waiting thread can continue, and no work is
// running or ready.
void Machine::find_deadlock() {
  if (failed_ || !round_started_ || attached_.empty() || running_ != 0 || !ready_.empty()) return;
  for (const HostThread* thread : attached_) {
    if (!thread->waiting || !thread->ready || thread->ready()) return;
  }
  for (const HostThread* thread : waiting_) {
    if (thread->ready()) return;
  }
  fail(deadlock_report());
}

std::size_t Machine::idle_workers() {
  const Lock lock(mutex);
  return seeded() ? 0 : idle_workers_;
}

void Machine::split(std::size_t count, std::size_t piece, const RunPiece& run) {
  if (count <= piece || seeded()) {
    for (std::size_t begin = 0; begin < count; begin += piece) run(begin, std::min(begin + piece, count));
    return;
  }
  Lock lock(mutex);
  Split split{run, count, piece};
  splits_.push_back(&split);
  if (idle_workers_ > 0) workers_wake_.notify_all();
  run_split(lock, split);
  workers_idle_.wait(lock, [&] { return split.running == 0; });
  if (split.error) std::rethrow_exception(split.error);
}

void Machine::run_split(Lock& lock, Split& split) {
  ++split.running;
  while (split.next < split.count) {
    const std::size_t begin = split.next, end = split.next = std::min(begin + split.piece, split.count);
    if (end == split.count) std::erase(splits_, &split);
    std::exception_ptr error;
    lock.unlock();
    try {
      split.run(begin, end);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (!error) continue;
    split.error = error;
    split.next = split.count;
    std::erase(splits_, &split);
  }
  if (--split.running == 0) workers_idle_.notify_all();
}

}  // namespace hostweave::cpu
