// Makes the channels of a program's teams.
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
struct Team {
  std::string mesh;  // "mesh(pp=2, dp=2, tp=4)"
  std::string axes;  // along which they differ: "dp, tp"
  std::string key;  // of all teams of all meshes: "mesh(pp=2, dp=2, tp=4) dp, tp, pp=1", with the coordinates they have in common
  int64_t place = 0;  // of this rank: its coordinates along the axes, the last one fastest
  int64_t size = 1;
};

// The teams of `rank` whose channels the program uses.
std::vector<Team> teams_of(const ProgramTable& program, int64_t rank);

// An id that no other team has.
ncclUniqueId new_team_id();

// The id of a team, the same for all its ranks. The first of them may make it.
using TeamId = std::function<ncclUniqueId(const Team&)>;
// Takes over a communicator that has been made.
using Keep = std::function<void(ncclComm_t)>;

// Makes the channels that the program uses and the rank does not have yet. Every rank of the program calls it, with its
// device current. Throws ExecutionError where the others of a team do not come within `timeout_seconds`.
void connect(Rank& rank, const ProgramTable& program, const TeamId& id_of, const Keep& keep, double timeout_seconds);

}  // namespace hw
