// One rank of a world, and the communicators of its programs: what an application makes before its programs.
#pragma once
#include <nccl.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/errors.h"
#include "hostweave/peer.h"
#include "hostweave/rank.h"

namespace hw {

// Throws ExecutionError if this host has fewer devices. The CPU target makes as many. Call it once, before any other call.
void use_devices(int count);
// Each rank is a process of its own. On the CPU target, every process calls it once, before any other call; CUDA needs nothing.
void use_processes();

// Used by one thread at a time, with `device` current. Lives longer than the programs that are made with it.
class World {
 public:
  // Joins the world: all ranks call it at the same time, with the id that one of them made by ncclGetUniqueId. Makes `device`
  // current. Throws ExecutionError.
  World(const ncclUniqueId& id, int device, int rank, int size);
  World(World&&) = delete;

  Rank& rank() { return rank_; }

  // Makes a channel of the rank, unless it is there. All ranks call it in the same order; those that give the same `color` are a
  // process group of `size` ranks, in the order of their `rank_in_group`. A rank of color kNone is in no group.
  static constexpr int kNone = -1;
  void join(const char* mesh, const char* axes, Transport transport, int color, int rank_in_group, int64_t size);

 private:
  ncclUniqueId agree(int color, int rank_in_group, const ncclUniqueId& own);

  struct Destroy {
    void operator()(ncclComm_t comm) const { ncclCommDestroy(comm); }
  };
  ncclComm_t communicator(const ncclUniqueId& id, int rank, int size);

  std::vector<std::unique_ptr<PeerGroup>> peers_;
  std::vector<std::unique_ptr<ncclComm, Destroy>> comms_;  // the first is that of all ranks
  std::set<std::string> joined_;
  Rank rank_;  // is destroyed before its channels
};

}  // namespace hw
