#include "hostweave/world.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/connect.h"
#include "hostweave/errors.h"
#include "world_target.h"

namespace hw {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 50ms;
constexpr auto kStopping = 2s;  // for ranks to stop by themselves
constexpr double kConnectSeconds = 300;

// Each round of a world is a party of its own: several threads may ask for one.
std::string new_party() {
  static std::atomic<uint64_t> count = 0;
  return "round " + std::to_string(count++);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

// Why to give up, or null.
std::exception_ptr asked(const GiveUp& give_up) {
  try {
    return give_up && give_up() ? std::make_exception_ptr(Interrupted()) : nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

World::World(int ranks) : members_(ranks) {
  const DeviceLease turn(new_party(), {}, ranks);  // throws where there are too few devices
  for (int i = 0; i < ranks; ++i) members_[i].thread = std::thread(&World::thread_main, this, i);
}

World::~World() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  for (Member& member : members_) member.thread.join();
}

bool World::broken() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

void World::dispatch(const Schedule& schedule, const Work& work, const GiveUp& give_up, bool alone) {
  const DeviceLease turn(new_party(), schedule, ranks(), give_up);
  std::unique_lock lock(mutex_);
  if (broken_ && !alone) throw ExecutionError("an error in another call has stopped the ranks; call again");
  work_ = &work;
  alone_ = alone;
  stopping_ = false;
  waiting_ = 0;
  for (Member& member : members_) member.busy = true;
  ++round_;
  changed_.notify_all();

  const auto all_done = [this] { return std::ranges::none_of(members_, &Member::busy); };
  auto stopped_at = std::chrono::steady_clock::time_point::max();
  while (!changed_.wait_for(lock, kLook, all_done)) {
    const auto now = std::chrono::steady_clock::now();
    if (!stopping_) {
      lock.unlock();
      const std::exception_ptr reason = asked(give_up);
      lock.lock();
      if (reason && !error_) {
        error_ = reason;
        stop(message_of(reason));
      }
    } else if (stopped_at == std::chrono::steady_clock::time_point::max()) {
      stopped_at = now;
    } else if (now - stopped_at > kStopping) {  // inside an NCCL call, which only another thread can end
      for (Member& member : members_) {
        if (member.busy) abort_channels(member, lock);
      }
    }
  }
  work_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void World::thread_main(int index) {
  Member& member = members_[index];
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || round_ != seen; });
    if (closing_) break;
    seen = round_;
    lock.unlock();
    perform(member, index);
    lock.lock();
    member.busy = false;
    changed_.notify_all();
  }
  lock.unlock();
  member.rank.reset();
  if (broken_) target::abort(std::exchange(member.owned, {}));
  for (const ncclComm_t comm : member.owned) ncclCommDestroy(comm);
}

void World::perform(Member& member, int index) {
  try {
    const target::Attached attached(index);
    try {
      HW_CHECK(cudaSetDevice(index));
      if (!member.rank) member.rank = std::make_unique<Rank>(index, index, ranks());
      if (!alone_) meet();  // were a rank done before another has come, the device could not tell that the other waits for ever
      (*work_)(*member.rank);
    } catch (...) {
      fail(std::current_exception());  // while attached: the others must not go on before they are stopped
    }
  } catch (...) {
    fail(std::current_exception());
  }
  std::unique_lock lock(mutex_);
  if (stopping_) abort_channels(member, lock);
}

// What a rank threw. The first error counts; the others follow from it.
void World::fail(std::exception_ptr error) {
  const std::string report = target::report();
  if (!report.empty()) error = std::make_exception_ptr(ExecutionError(report));
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
  if (!alone_) stop(message_of(error));
}

// With mutex_ held.
void World::stop(const std::string& reason) {
  if (stopping_) return;
  stopping_ = broken_ = true;
  target::stop(reason);
  changed_.notify_all();
}

// With the lock held, but for the aborts. The kernels of a communicator that is waiting for its peers end when it is aborted;
// the abort waits for its device, which may wait for the kernels of other ranks, so all must be able to abort at once.
void World::abort_channels(Member& member, std::unique_lock<std::mutex>& lock) {
  const std::vector<ncclComm_t> comms = std::exchange(member.owned, {});
  lock.unlock();
  target::abort(comms);
  lock.lock();
}

void World::meet() {
  if (target::meet(ranks())) return;
  std::unique_lock lock(mutex_);
  const uint64_t mine = meetings_;
  if (++waiting_ == ranks()) {
    waiting_ = 0;
    ++meetings_;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return meetings_ != mine || stopping_; });
  if (stopping_) throw ExecutionError("stopped, because another rank failed");
}

void World::synchronize(cudaStream_t stream) {
  while (!target::synchronize(stream)) {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw ExecutionError("stopped, because another rank failed");
  }
}

ncclUniqueId World::process_group_id(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto [id, fresh] = process_group_ids_.try_emplace(key);
  if (fresh) id->second = new_process_group_id();
  return id->second;
}

void World::connect(const Schedule& schedule, const ProgramTable& program, const GiveUp& give_up) {
  if (program.world != ranks()) {
    throw ArgumentError(std::string(program.name) + ": a program for " + std::to_string(program.world) +
                        " ranks, in a world of " + std::to_string(ranks()));
  }
  const auto id_of = [this](const ProcessGroup& process_group) { return process_group_id(process_group.key); };
  const auto work = [&](Rank& rank) {
    const auto keep = [&](ncclComm_t comm) {
      const std::lock_guard lock(mutex_);
      members_[rank.index()].owned.push_back(comm);
    };
    hw::connect(rank, program, id_of, keep, kConnectSeconds);
  };
  each(schedule, work, give_up);
}

}  // namespace hw
