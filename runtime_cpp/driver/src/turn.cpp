#include "hostweave/turn.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "world_target.h"

namespace hw {
namespace {

using namespace std::chrono_literals;

struct {
  std::mutex mutex;
  std::condition_variable free;
  std::string party;
  Schedule schedule;
  int turns = 0;                               // of that party, now
  std::map<std::string, std::string> stopped;  // parties, and why
} devices;

constexpr auto kPoll = 50ms;

}  // namespace

std::unique_lock<std::timed_mutex> take_turn(std::timed_mutex& mutex, const GiveUp& give_up) {
  std::unique_lock turn(mutex, std::defer_lock);
  while (!turn.try_lock_for(kPoll)) {
    if (give_up && give_up()) throw Interrupted();
  }
  return turn;
}

Turn::Turn(const std::string& party, const Schedule& schedule, int ranks, const GiveUp& give_up) {
  std::unique_lock lock(devices.mutex);
  const auto ours = [&] { return devices.turns == 0 || (devices.party == party && devices.schedule == schedule); };
  while (!devices.free.wait_for(lock, kPoll, ours)) {
    lock.unlock();
    if (give_up && give_up()) throw Interrupted();
    lock.lock();
  }
  if (devices.turns == 0) {
    target::configure(schedule, ranks);
    devices.party = party;
    devices.schedule = schedule;
  }
  ++devices.turns;
}

void Turn::stop(const std::string& party, const std::string& reason) {
  const std::lock_guard lock(devices.mutex);
  const std::string& first = devices.stopped.emplace(party, reason).first->second;
  if (devices.turns > 0 && devices.party == party) target::stop(first);
}

std::string Turn::stopped(const std::string& party) {
  const std::lock_guard lock(devices.mutex);
  const auto found = devices.stopped.find(party);
  return found == devices.stopped.end() ? "" : found->second;
}

Turn::~Turn() {
  const std::lock_guard lock(devices.mutex);
  if (--devices.turns == 0) devices.free.notify_all();
}

}  // namespace hw
