// Leases of the devices of this process, so that groups of ranks use the devices one after another.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace hw {

// Settings of the scheduler of the CPU device. On CUDA, `seeded` is an error, and the other settings have no effect.
struct Schedule {
  bool seeded = false;  // runs one operation at a time, in an order chosen by the seed
  uint64_t seed = 0;    // this and the following fields are as in hw_cpu_config
  int picker = 0;
  int ordered_launches = -1;
  int buffered_sends = -1;
  int check_dependencies = -1;
  double timeout_seconds = 120;  // time without progress after which a call fails
  bool processes = false;        // ranks are processes, and this process is one of them

  bool operator==(const Schedule&) const = default;
};

// RAII lease of the devices for one party. A party is the ranks of one group in this process. All leases that exist at a time are
// of one party and one schedule, because two parties on the same devices could deadlock. A lease configures the devices if no
// other lease exists. On CUDA, Member::Use takes no lease.
class DeviceLease {
 public:
  // Waits for the lease, for at most `seconds` if set. Holds no lease after a timeout, or on a thread
  // that runs a function passed to `free`.
  DeviceLease(const std::string& party, const Schedule& schedule, int ranks, std::optional<double> seconds = {});
  ~DeviceLease();
  DeviceLease(DeviceLease&&) = delete;

  bool held() const { return held_; }

  // Makes later runs of the party fail. Also makes blocked runs fail if the devices support this. Later calls do not replace the
  // reason.
  static void stop(const std::string& party, const std::string& reason);
  // Reason why the party was stopped, or "".
  static std::string stopped(const std::string& party);

  // Calls `release`, which frees device resources, while no party holds a lease: now if possible, otherwise later on another
  // thread. On CUDA, always calls `release` now. Does not wait for leases of ranks, because other ranks may wait for the
  // calling rank. Deferred releases run in FIFO order.
  static void free(std::function<void()> release);

 private:
  bool held_ = false;
};

}  // namespace hw
