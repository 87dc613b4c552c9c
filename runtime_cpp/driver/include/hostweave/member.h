// One rank of a group; other threads or processes drive the other ranks.
#pragma once
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hostweave/device_lease.h"
#include "hostweave/peer.h"
#include "hostweave/process_group.h"
#include "hostweave/rank.h"

namespace hw {

namespace target {
class Attached;
}

// RAII: makes a device current. The destructor makes the previous device current again, but only if that device is initialised.
// Otherwise CUDA would initialise the previous device, which costs time and memory.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(OnDevice&&) = delete;

 private:
  int before_ = 0;
  bool changed_;
};

// Device and channels of a rank. Only one thread at a time may use a member, but any thread may call `abort`.
class Member {
 public:
  // All ranks of the group pass the same name `group`. Other groups of this process have other names. The other ranks are
  // threads of this process, or processes if `processes` is set.
  Member(std::string group, int device, int64_t index, int64_t size, bool processes);
  ~Member();
  Member(Member&&) = delete;

  // Device of rank `index`, which is rank `local` of its host. Throws ExecutionError if CUDA finds no GPU.
  static int device_for(int64_t index, int64_t local);

  Rank& rank() { return rank_; }
  int device() const { return rank_.device(); }

  // Process groups of the program that have no channel yet. Throws ArgumentError if the program and the group have different
  // numbers of ranks.
  std::vector<ProcessGroup> missing_process_groups(const ProgramTable& program) const;
  ncclUniqueId new_process_group_id(const ProgramTable& program, const std::string& key);
  ncclUniqueId new_id(Transport transport);
  // Collective: creates the missing channels of the program. `ids` has an id for each missing process group, by
  // ProcessGroup::key. Throws ExecutionError if other ranks do not join in time.
  void connect(const ProgramTable& program, const std::map<std::string, ncclUniqueId>& ids, double timeout_seconds);
  // Collective in one process group: creates its channel. Call this function during a Use.
  void connect(const ProcessGroup& process_group, const ncclUniqueId& id, double timeout_seconds);
  // Uses communicators of the application as channels. The key of a communicator is ProcessGroup::name(). If the mesh of the
  // process group is not the mesh of the program, the mesh precedes the name. Throws ArgumentError if the communicators or the
  // number of ranks do not fit the program.
  void adopt(const ProgramTable& program, const std::map<std::string, ncclComm_t>& communicators);

  // Collective. For channels with transport `one_sided` or `peer`, returns the reason why their ranks cannot access each other's
  // memory, or "" if no reason is known.
  std::string out_of_reach(const ProgramTable& program);

  // add_graph registers a graph that uses channels of the member, and destroy_graph destroys the graph. An abort also tries to
  // destroy registered graphs, because NCCL destroys a communicator only after the graphs that use the communicator.
  void add_graph(cudaGraphExec_t graph);
  void destroy_graph(cudaGraphExec_t graph);

  // Ends all waits for other ranks, except in adopted communicators on GPUs. Destroys the graphs if the running call then ends
  // soon. Any thread may call this function. The member is unusable afterwards.
  void abort(const std::string& reason);
  // Makes later runs of the ranks of the group in this process fail. Also makes blocked runs fail if the target supports this.
  // Later calls do not replace the reason.
  void stop(const std::string& reason);
  // The reason passed to stop, or "".
  std::string stopped() const;

  // During a Use: waits until the stream is done. Throws ExecutionError if the ranks were stopped.
  void synchronize(cudaStream_t stream) const;

  // Leases the devices for the ranks of the group in this process. Returns null after a timeout. Throws ExecutionError if there
  // are too few devices, or if the devices do not support the schedule.
  std::unique_ptr<DeviceLease> lease(const Schedule& schedule, double seconds) const;

  // RAII: exclusive use of the member by this thread. Makes the device current. On the CPU target, also holds a lease for the
  // group. The constructors throw ExecutionError after an abort, unless `frees` is set.
  class Use {
   public:
    // For work outside of runs, such as a capture or a new channel. `frees`: the work only frees resources. Otherwise throws
    // ExecutionError if the ranks were stopped.
    explicit Use(Member& member, bool frees = false);
    // For runs, in which all ranks of the group work together. Throws ExecutionError if the ranks were stopped.
    Use(Member& member, const Schedule& schedule);
    ~Use();
    Use(Use&&) = delete;

   private:
    void take(Member& member, Schedule schedule, bool frees);

    std::optional<DeviceLease> turn_;
    std::unique_lock<std::timed_mutex> lock_;
    std::unique_ptr<target::Attached> attached_;
    std::optional<OnDevice> device_;
  };

 private:
  template <class Communicator>
  void add_channel(const ProcessGroup& of, Communicator&& communicator);
  void destroy_graphs();
  // Throws ExecutionError if the ranks were stopped.
  void expect_not_stopped() const;

  std::string group_;
  Rank rank_;
  bool processes_;
  std::timed_mutex in_use_;
  std::mutex owned_mutex_;
  std::vector<ncclComm_t> owned_;                  // communicators that `connect` created
  std::vector<std::unique_ptr<PeerGroup>> peers_;  // groups of the channels with transport `peer`
  std::set<cudaGraphExec_t> graphs_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace hw
