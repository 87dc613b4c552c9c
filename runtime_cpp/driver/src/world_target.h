// What the two targets do differently for worlds and members: world_cpu.cpp or world_cuda.cpp is linked.
#pragma once
#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hostweave/connect.h"
#include "hostweave/device_lease.h"

namespace hw::target {

// Throws Error unless this machine has `ranks` devices. Also takes the schedule: called before the ranks begin a round.
void configure(const Schedule& schedule, int ranks);

// While it lives, the thread acts for this rank on the device of the same number.
class Attached {
 public:
  explicit Attached(int rank);
  ~Attached();
  Attached(Attached&&) = delete;
};

// Waits for all ranks by means that the device can see. False: the device sees no waiting, so the world does it.
bool meet(int ranks);
// Holds streams of all ranks, so that what is enqueued on them meanwhile begins on all devices together, and without the host.
// What holds nothing, as where the host is the device, says so.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(Gate&&) = delete;

  bool holds() const { return opened_ != nullptr; }
  // What comes later on the stream waits until the gate has been opened for this round.
  void hold(cudaStream_t stream, uint32_t round) const;
  void open(uint32_t round = INT32_MAX) const;

  struct Opening {  // for good, at its end
    explicit Opening(const Gate& opened) : gate(opened) {}
    ~Opening() { gate.open(); }
    Opening(Opening&&) = delete;
    const Gate& gate;
  };

 private:
  uint32_t* opened_ = nullptr;  // the last round, in memory of the host that devices read
};

// Blocks until the stream is done. False: not done yet, ask again, so that the caller can look whether it is to stop.
bool synchronize(cudaStream_t stream);
// For how many seconds ranks may stand still before the caller stops them; for ever where the device sees that by itself.
double patience(const Schedule& schedule);
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
