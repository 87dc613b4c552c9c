// All ranks of a mesh in this process: one thread and one device a rank. World(n) uses devices 0 to n-1.
#pragma once
#include <nccl.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/device_lease.h"
#include "hostweave/rank.h"

namespace hw {

class World {
 public:
  explicit World(int ranks);
  ~World();
  World(World&&) = delete;

  int ranks() const { return static_cast<int>(members_.size()); }
  // After an error that stopped the ranks midway: what they share is in no known state, so make another world.
  bool broken() const;

  using Work = std::function<void(Rank&)>;
  // Runs `work` on every rank's thread and returns when all are done. When one throws, the others are stopped wherever
  // they wait, and its exception is rethrown. Where `give_up` says so all are stopped, and Interrupted is thrown, or what it
  // threw. Of all worlds of a process one runs at a time: two on the same devices could deadlock.
  void each(const Schedule& schedule, const Work& work, const GiveUp& give_up = {}) { dispatch(schedule, work, give_up, false); }
  // The same for work in which no rank waits for another: a failure stops nobody and breaks nothing.
  void each_alone(const Schedule& schedule, const Work& work, const GiveUp& give_up = {}) {
    dispatch(schedule, work, give_up, true);
  }

  // Makes the channels that a program uses and that the ranks do not have yet.
  void connect(const Schedule& schedule, const ProgramTable& program, const GiveUp& give_up = {});

  // From inside `work`: waits until every rank is here, or throws when they are being stopped.
  void meet();
  // From inside `work`: waits until the stream is done, or throws when the ranks are being stopped.
  void synchronize(cudaStream_t stream);

 private:
  struct Member {
    std::unique_ptr<Rank> rank;     // made, used and destroyed by the thread
    std::vector<ncclComm_t> owned;  // behind the channels of `rank`; guarded by mutex_
    bool busy = false;              // has not finished this round
    std::thread thread;
  };

  void dispatch(const Schedule& schedule, const Work& work, const GiveUp& give_up, bool alone);
  void thread_main(int index);
  void perform(Member& member, int index);
  void fail(std::exception_ptr error);
  void stop(const std::string& reason);
  void abort_channels(Member& member, std::unique_lock<std::mutex>& lock);
  ncclUniqueId process_group_id(const std::string& key);

  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::vector<Member> members_;
  const Work* work_ = nullptr;
  bool alone_ = false;
  uint64_t round_ = 0;  // counts dispatches
  bool closing_ = false;
  bool stopping_ = false;
  bool broken_ = false;
  int waiting_ = 0;  // ranks in meet()
  uint64_t meetings_ = 0;
  std::exception_ptr error_;  // the first of this round
  std::map<std::string, ncclUniqueId> process_group_ids_;
};

}  // namespace hw
