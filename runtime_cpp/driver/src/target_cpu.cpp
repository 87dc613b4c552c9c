#include <hostweave_cpu.h>

#include <algorithm>
#include <optional>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/reach.h"
#include "target.h"

namespace hw::target {
namespace {

void check(int status) {
  if (status != 0) throw ExecutionError(hw_cpu_last_report());
}

}  // namespace

// Always resets the device for a seeded schedule, so that a seed always gives the same order of operations.
void configure(const Schedule& schedule, int ranks) {
  static std::optional<Schedule> last;
  static int last_ranks = 0, devices = 8;
  if (last == schedule && last_ranks == ranks && !schedule.seeded && !hw_cpu_failed()) return;
  devices = std::max(devices, ranks);
  hw_cpu_config config;
  config.mode = schedule.seeded ? HW_CPU_SEEDED : HW_CPU_PARALLEL;
  config.seed = schedule.seed;
  config.picker = schedule.picker;
  config.devices = devices;
  config.ranks = ranks;
  config.processes = schedule.processes;
  config.ordered_launches = schedule.ordered_launches;
  config.buffered_sends = schedule.buffered_sends;
  config.check_dependencies = schedule.check_dependencies;
  config.timeout_seconds = schedule.timeout_seconds;
  last.reset();  // If this configuration fails, the next call configures again.
  check(hw_cpu_configure(&config));
  last = schedule;
  last_ranks = ranks;
}

Attached::Attached(int rank) {
  if (hw_cpu_attach(rank) == 0) return;
  const std::string report = hw_cpu_last_report();
  hw_cpu_detach();  // If another rank has failed, hw_cpu_attach returns an error but attaches the thread.
  throw ExecutionError(report);
}

Attached::~Attached() { hw_cpu_detach(); }

void meet(int ranks) { check(hw_cpu_barrier(ranks)); }

// Waits for all streams, so that this call reports errors of work that a program did not join.
bool synchronize(cudaStream_t) {
  HW_CHECK(cudaDeviceSynchronize());
  return true;
}

std::string report() { return hw_cpu_failed() ? hw_cpu_last_report() : ""; }

void stop(const std::string& reason) { hw_cpu_abort(reason.c_str()); }

const bool kOneParty = true;
const bool kCopiesBlock = false;

bool is_set_up(int) { return true; }

int device_for(int64_t index, int64_t) { return static_cast<int>(index); }

// Ignores the timeout and `aborted`. The device has its own timeout: Schedule::timeout_seconds without progress.
ncclComm_t make_channel(const ProcessGroup& process_group, const ncclUniqueId& id, int, double, const std::atomic<bool>&) {
  ncclComm_t comm = nullptr;
  HW_CHECK(ncclCommInitRank(&comm, static_cast<int>(process_group.size), id, static_cast<int>(process_group.rank_in_group)));
  return comm;
}

void abort(const std::vector<ncclComm_t>& comms) { abort_with_windows(comms); }

void finish() { HW_CHECK(cudaDeviceSynchronize()); }

}  // namespace hw::target

namespace hw {

Gate::Gate(int ranks) : ranks_(ranks) {}

Gate::~Gate() = default;

void Gate::hold(cudaStream_t, uint32_t) const {}

void Gate::open(uint32_t) const {}

}  // namespace hw
