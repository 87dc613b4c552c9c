#include "hostweave/device_lease.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <utility>

#include "hostweave/background.h"
#include "target.h"

namespace hw {
namespace {

struct Devices {
  std::mutex mutex;
  std::condition_variable free;
  std::string party;
  Schedule schedule;
  int turns = 0;                               // number of current leases; all belong to `party`
  std::map<std::string, std::string> stopped;  // party -> reason
  std::queue<std::function<void()>> releases;  // run when no lease exists
  bool has_reaper = false;
};
Devices& devices() { return immortal<Devices>(); }

constexpr char kReaper[] = "what is freed";
thread_local bool is_freeing = false;  // this thread runs a release

// Runs one release, without the lock. The caller holds the lock, and no lease exists.
void release(std::unique_lock<std::mutex>& lock, const std::function<void()>& release) {
  devices().turns = 1;
  devices().party = kReaper;
  devices().schedule = {};
  try {
    target::configure({}, 1);
  } catch (const std::exception&) {
    // The error is ignored, because `release` may still succeed.
  }
  lock.unlock();
  is_freeing = true;
  try {
    release();
  } catch (const std::exception&) {
    // The error is ignored, because other parties may wait for the devices.
  }
  is_freeing = false;
  lock.lock();
  devices().turns = 0;
  devices().free.notify_all();
}

void deferred_free() {
  std::unique_lock lock(devices().mutex);
  for (;;) {
    devices().free.wait(lock, [] { return devices().turns == 0 && !devices().releases.empty(); });
    const std::function<void()> next = std::move(devices().releases.front());
    devices().releases.pop();
    release(lock, next);
  }
}

}  // namespace

DeviceLease::DeviceLease(const std::string& party, const Schedule& schedule, int ranks, std::optional<double> seconds) {
  if (is_freeing) return;
  std::unique_lock lock(devices().mutex);
  const auto ours = [&] { return devices().turns == 0 || (devices().party == party && devices().schedule == schedule); };
  if (!seconds) devices().free.wait(lock, ours);
  if (seconds && !devices().free.wait_for(lock, std::chrono::duration<double>(*seconds), ours)) return;
  if (devices().turns == 0) {
    target::configure(schedule, ranks);
    devices().party = party;
    devices().schedule = schedule;
  }
  ++devices().turns;
  held_ = true;
}

void DeviceLease::stop(const std::string& party, const std::string& reason) {
  const std::lock_guard lock(devices().mutex);
  const std::string& first = devices().stopped.emplace(party, reason).first->second;
  if (devices().turns > 0 && devices().party == party) target::stop(first);
}

std::string DeviceLease::stopped(const std::string& party) {
  const std::lock_guard lock(devices().mutex);
  const auto found = devices().stopped.find(party);
  return found == devices().stopped.end() ? "" : found->second;
}

void DeviceLease::free(std::function<void()> release) {
  if (!target::kOneParty || is_freeing) return release();
  std::unique_lock lock(devices().mutex);
  devices().free.wait(lock, [] { return devices().turns == 0 || devices().party != kReaper; });
  if (devices().turns == 0 && devices().releases.empty()) return hw::release(lock, release);
  devices().releases.push(std::move(release));
  try {
    if (!std::exchange(devices().has_reaper, true)) std::thread(deferred_free).detach();
  } catch (const std::system_error&) {  // The thread could not start. The next `free` tries again.
    devices().has_reaper = false;
  }
  devices().free.notify_all();
}

DeviceLease::~DeviceLease() {
  if (!held_) return;
  const std::lock_guard lock(devices().mutex);
  if (--devices().turns == 0) devices().free.notify_all();
}

}  // namespace hw
