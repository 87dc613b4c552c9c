// One rank of a group whose other ranks are driven by other threads or processes.
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

// Makes a device current; the one before is current again afterwards, unless nothing has used that yet: on CUDA, naming a
// device is enough to set it up, which takes time and memory.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(OnDevice&&) = delete;

 private:
  int before_ = 0;
  bool changed_;
};

// The rank's device and channels. Used by one thread at a time, except for `abort`.
class Member {
 public:
  // `group` is the same on all ranks of the group, and of no other group of this process. The others are threads of this
  // process, or `processes`.
  Member(std::string group, int device, int64_t index, int64_t size, bool processes);
  ~Member();
  Member(Member&&) = delete;

  // The device of a rank that is the `local`-th of its host. Throws ExecutionError where the target has none.
  static int device_for(int64_t index, int64_t local);

  Rank& rank() { return rank_; }
  int device() const { return rank_.device(); }

  // The process groups of the program whose channels are still to be made. Throws ArgumentError where the group has another size.
  std::vector<ProcessGroup> missing_process_groups(const ProgramTable& program) const;
  // An id for the one of this key.
  ncclUniqueId new_process_group_id(const ProgramTable& program, const std::string& key);
  // An id for a group of that transport.
  ncclUniqueId new_id(Transport transport);
  // Makes those channels, with an id by the key of each: every rank of the group calls it. Throws ExecutionError where the others
  // do not come in time.
  void connect(const ProgramTable& program, const std::map<std::string, ncclUniqueId>& ids, double timeout_seconds);
  // Makes the channel of one process group, while in use. Every rank of it calls it.
  void connect(const ProcessGroup& process_group, const ncclUniqueId& id, double timeout_seconds);
  // Uses communicators that the host keeps, by the axes of their process groups, instead. Throws ArgumentError where one is
  // missing, or where this rank has another number in it than in the mesh.
  void adopt(const ProgramTable& program, const std::map<std::string, ncclComm_t>& communicators);

  // Why some ranks of the program's one-sided channels cannot write to each other's memory; "" where they can, as far as that is
  // known.
  std::string out_of_reach(const ProgramTable& program);

  // Has graphs that use its channels, on which the communicators depend: NCCL waits for their graphs before it gives one up.
  void add_graph(cudaGraphExec_t graph);
  void destroy_graph(cudaGraphExec_t graph);

  // From any thread: ends what waits for other ranks, and destroys the graphs. The member is of no use any more.
  void abort(const std::string& reason);
  // Ends the runs of the group's ranks in this process, as far as the target can do that. The first reason counts.
  void stop(const std::string& reason);
  // That reason, or "".
  std::string stopped() const;

  // In use: waits until the stream is done. Throws ExecutionError where the ranks were stopped.
  void synchronize(cudaStream_t stream) const;

  // The turn of all ranks of the group, which are in this process, for somebody who has them work; null where it does not come
  // within so many seconds. Throws ExecutionError where there are fewer devices, or none that run by such a schedule.
  std::unique_ptr<DeviceLease> lease(const Schedule& schedule, double seconds) const;

  // Throws ExecutionError after an abort.
  void expect_working() const;

  // While it lives, the calling thread has the member, the turn of its group, and its device.
  class Use {
   public:
    // For what the rank does by itself, or with the ranks of a process group.
    explicit Use(Member& member);
    // For what all ranks of the group do at the same time. Throws ExecutionError where they were stopped.
    Use(Member& member, const Schedule& schedule);
    ~Use();
    Use(Use&&) = delete;

   private:
    std::optional<DeviceLease> turn_;
    std::unique_lock<std::timed_mutex> lock_;
    std::unique_ptr<target::Attached> attached_;
    std::optional<OnDevice> device_;
  };

 private:
  template <class Communicator>
  void add_channel(const ProcessGroup& of, Communicator&& communicator);
  void destroy_graphs();
  // Asked in a turn, when nobody can make the devices serve another party: a rank may have failed before this one began.
  void expect_not_stopped() const;

  Schedule with_processes(Schedule schedule) const {
    schedule.processes = processes_;
    return schedule;
  }

  std::string group_;
  Rank rank_;
  bool processes_;
  std::timed_mutex in_use_;
  std::mutex owned_mutex_;
  std::vector<ncclComm_t> owned_;                  // behind the channels of rank_
  std::vector<std::unique_ptr<PeerGroup>> peers_;  // likewise, of the transport peer
  std::set<cudaGraphExec_t> graphs_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace hw
