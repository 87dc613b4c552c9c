// Whose turn it is on the devices of this process.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace hw {

// How the CPU device runs ranks and their streams. The CUDA target has no choice.
struct Schedule {
  bool seeded = false;  // one thing at a time, chosen by the seed, instead of everything at once
  uint64_t seed = 0;    // this and the rest as in hw_cpu_config
  int picker = 0;
  int ordered_launches = -1;
  int buffered_sends = -1;
  int check_dependencies = -1;
  double timeout_seconds = 120;  // without progress, after which a call is given up
  bool processes = false;        // the ranks are processes, of which this one has one

  bool operator==(const Schedule&) const = default;
};

// While it lives, the devices serve one party: the ranks of a group that are in this process, which have their turns together.
// Other parties wait, and so do ranks of the same party that want another schedule: two parties on the same devices could
// deadlock. The first turn configures the devices for the party.
class DeviceLease {
 public:
  // Waits for the turn, or for at most so many seconds, and then does not have it.
  DeviceLease(const std::string& party, const Schedule& schedule, int ranks, std::optional<double> seconds = {});
  ~DeviceLease();
  DeviceLease(DeviceLease&&) = delete;

  bool held() const { return held_; }

  // Makes every blocked or later run of the party fail, where the devices can do that. The first reason counts.
  static void stop(const std::string& party, const std::string& reason);
  // Why the party was stopped, or "".
  static std::string stopped(const std::string& party);

  // Frees what some party holds on the devices, in a turn of its own: now, or by another thread when nobody has a turn.
  // Whoever frees may be a rank that others wait for in theirs, so it does not wait. First come, first freed.
  static void free(std::function<void()> release);

 private:
  bool held_ = false;
};

}  // namespace hw
