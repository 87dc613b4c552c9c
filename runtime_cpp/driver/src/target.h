// What the two targets do differently for the ranks of this process: target_cpu.cpp or target_cuda.cpp is linked.
#pragma once
#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hostweave/device_lease.h"
#include "hostweave/gate.h"
#include "hostweave/process_group.h"

namespace hw::target {

// Throws ExecutionError unless this machine has `ranks` devices. Also takes the schedule: called before the ranks begin a round.
void configure(const Schedule& schedule, int ranks);

// While it lives, the thread acts for this rank on the device of the same number.
class Attached {
 public:
  explicit Attached(int rank);
  ~Attached();
  Attached(Attached&&) = delete;
};

// Waits for all ranks where the device watches them: were one done before another has come, it could not tell that the other
// waits for ever.
void meet(int ranks);
// Blocks until the stream is done. False: not done yet, ask again, so that the caller can look whether it is to stop.
bool synchronize(cudaStream_t stream);
// What the device says of the failure that stopped all ranks, else "".
std::string report();
// Makes every blocked or later call of every rank fail, where the device can do that.
void stop(const std::string& reason);

// Whether the devices must serve one group after another.
extern const bool kOneParty;
// Whether anything uses the device already.
bool is_set_up(int device);
// The device of a rank that is the `local`-th of its host.
int device_for(int64_t index, int64_t local);
// Every rank of the process group calls it, with its device current. Throws ExecutionError where some do not in time.
ncclComm_t make_channel(const ProcessGroup& process_group, const ncclUniqueId& id, int device, double timeout_seconds);
// Aborts communicators, on a thread that has their device: what streams wait for on them ends, also where a peer is gone.
void abort(const std::vector<ncclComm_t>& comms);
// What a call of a program on a member waits for: on the CPU target for its device, elsewhere for nothing.
void finish();

}  // namespace hw::target
