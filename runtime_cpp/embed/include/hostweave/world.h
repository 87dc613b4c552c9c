// One rank of a world, and the communicators of its programs. An application makes the World before its programs.
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

// Declares that ranks are threads of this process, with `count` devices. The CPU target creates the devices. The CUDA target
// throws ExecutionError if this host has fewer than `count` GPUs. Call this function once, before any other call.
void use_devices(int count);
// Declares that ranks are processes. On the CPU target, every process calls this function once, before any other call.
void use_processes();

// Only one thread at a time may use a World, with `device` current. The World must outlive its programs.
class World {
 public:
  // Collective: joins the world. One rank makes the id by ncclGetUniqueId. Makes `device` current.
  World(const ncclUniqueId& id, int device, int rank, int size);
  World(World&&) = delete;

  Rank& rank() { return rank_; }

  // Collective: makes a channel of the rank, unless the channel exists. Ranks with the same `color` form a process group of
  // `size` ranks, ordered by `rank_in_group`. A rank with color kNone is in no group.
  static constexpr int kNone = -1;
  void join(const char* mesh, const char* axes, Transport transport, int color, int rank_in_group, int64_t size);

 private:
  ncclUniqueId agree(int color, int rank_in_group, const ncclUniqueId& own);

  ncclComm_t communicator(const ncclUniqueId& id, int rank, int size);

  std::vector<std::unique_ptr<PeerGroup>> peers_;
  std::vector<std::unique_ptr<ncclComm, decltype(&ncclCommDestroy)>> comms_;  // the first contains all ranks
  std::set<std::string> joined_;
  Rank rank_;  // destroyed before the communicators
};

}  // namespace hw
