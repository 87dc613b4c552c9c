// Target-specific operations; target_cpu.cpp or target_cuda.cpp implements them.
#pragma once
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "hostweave/device_lease.h"
#include "hostweave/gate.h"
#include "hostweave/process_group.h"

namespace hw::target {

// Sets the schedule before the ranks start a round. Throws ExecutionError unless this machine has `ranks` devices.
void configure(const Schedule& schedule, int ranks);

// RAII: while it lives, this thread is the thread of a rank, whose device has the same number.
class Attached {
 public:
  explicit Attached(int rank);
  ~Attached();
  Attached(Attached&&) = delete;
};

// Barrier of all ranks if the device detects deadlocks. If one rank left before another arrived, a deadlock of the latter would
// go undetected.
void meet(int ranks);
// Blocks until the stream is done. False: not done yet; call again after checking for a stop request.
bool synchronize(cudaStream_t stream);
// The device's report of the failure that stopped all ranks, or "".
std::string report();
// Makes every blocked or later call of every rank fail, if the device supports it.
void stop(const std::string& reason);

// True if only one group at a time may use the devices.
extern const bool kOneParty;
// True if a copy to memory of the host blocks the thread until the stream is done.
extern const bool kCopiesBlock;
// True if the device has been initialised.
bool is_set_up(int device);
// Device of the rank with index `local` on its host.
int device_for(int64_t index, int64_t local);
// Collective in the process group, with the device current. Throws ExecutionError if some ranks do not join in time, or if
// `aborted` becomes true.
ncclComm_t make_channel(const ProcessGroup& process_group, const ncclUniqueId& id, int device, double timeout_seconds,
                        const std::atomic<bool>& aborted);
// Aborts communicators, with their device current. Ends waits of streams on them, even if a peer is gone.
void abort(const std::vector<ncclComm_t>& comms);
// Waits at the end of a call: for the device on the CPU target, not at all on CUDA.
void finish();

}  // namespace hw::target
