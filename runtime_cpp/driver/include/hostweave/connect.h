// Makes the channels of a program's process groups.
#pragma once
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/rank.h"

namespace hw {

// The ranks of a mesh that share a channel, seen from one of them.
struct ProcessGroup {
  std::string mesh;  // "mesh(pp=2, dp=2, tp=4)"
  std::string axes;  // along which they differ: "dp, tp"
  std::string key;   // of all process groups of all meshes: "mesh(pp=2, dp=2, tp=4) dp, tp, pp=1", with the coordinates they have
                     // in common
  int64_t rank_in_group = 0;  // its coordinates along the axes, the last one fastest
  int64_t size = 1;
  std::vector<int64_t> ranks = {};  // of the world, in the order that they have in the group
  Transport transport = Transport::two_sided;

  // The axes, and the transport where it is another than usual.
  std::string name() const { return axes + (transport == Transport::one_sided ? " one_sided" : ""); }
};

// The process groups of `rank` whose channels the program uses.
std::vector<ProcessGroup> process_groups_of(const ProgramTable& program, int64_t rank);

// An id that no other process group has.
ncclUniqueId new_process_group_id();

// The id of a process group, the same for all its ranks. The first of them may make it.
using ProcessGroupId = std::function<ncclUniqueId(const ProcessGroup&)>;
// Takes over a communicator that has been made.
using Keep = std::function<void(ncclComm_t)>;

// Makes the channel of a process group. Every rank of it calls it.
void connect(Rank& rank, const ProcessGroup& process_group, const ncclUniqueId& id, const Keep& keep, double timeout_seconds);
// Makes the channels that the program uses and the rank does not have yet. Every rank of the program calls it, with its
// device current. Throws ExecutionError where the others of a process group do not come within `timeout_seconds`.
void connect(Rank& rank, const ProgramTable& program, const ProcessGroupId& id_of, const Keep& keep, double timeout_seconds);

}  // namespace hw
