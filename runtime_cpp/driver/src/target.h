// Target-specific operations, implemented by target_cpu.cpp or target_cuda.cpp.
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

// Sets the schedule of the next calls on the CPU device. On CUDA, throws ExecutionError if the schedule is seeded, or if this
// machine has fewer than `ranks` GPUs.
void configure(const Schedule& schedule, int ranks);

// RAII: attaches this thread to the CPU device as the thread of a rank. Does nothing on CUDA.
class Attached {
 public:
  explicit Attached(int rank);
  ~Attached();
  Attached(Attached&&) = delete;
};

// Barrier of all ranks on the CPU device. Without this barrier, a rank could detach before another rank attaches. Then the
// device would miss a deadlock.
void meet(int ranks);
// Waits for the stream, or returns false if it is not done yet. The caller then checks if the ranks are stopped, and calls again.
bool synchronize(cudaStream_t stream);
// Report of the failure that stopped all ranks, or "".
std::string report();
// Makes every blocked or later call of every rank fail on the CPU device. Does nothing on CUDA.
void stop(const std::string& reason);

// True if only one group at a time may use the devices.
extern const bool kOneParty;
// True if a copy to pageable host memory blocks the thread until the stream is done.
extern const bool kCopiesBlock;
// True if the device has been initialised.
bool is_set_up(int device);
// Device of rank `index`, which has index `local` on its host.
int device_for(int64_t index, int64_t local);
// Collective in the process group: creates its communicator. The device must be current. Throws ExecutionError if some ranks do
// not join in time or, on CUDA, if `aborted` becomes true.
ncclComm_t make_channel(const ProcessGroup& process_group, const ncclUniqueId& id, int device, double timeout_seconds,
                        const std::atomic<bool>& aborted);
// Aborts communicators. Their device must be current. Ends the waits of streams for peers, but waits for
// signals of NCCL only with NCCL 2.32 or later.
void abort(const std::vector<ncclComm_t>& comms);
// On CUDA: finds the signals that NCCL's one-sided calls of a new communicator wait for, so that `abort` can set the signals.
// Forgets the signals of a closed communicator with the same address. The device of the communicator must be current.
void find_signals(ncclComm_t comm, const ProcessGroup& process_group);
// Called at the end of a call. Waits for the device on the CPU target. Does nothing on CUDA.
void finish();

}  // namespace hw::target
