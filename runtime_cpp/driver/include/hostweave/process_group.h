// Process groups of a program's channels.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "hostweave/abi.h"

namespace hw {

// Ranks of a mesh that share a channel, from the view of one rank.
struct ProcessGroup {
  std::string mesh;           // "mesh(pp=2, dp=2, tp=4)"
  std::string axes;           // axes along which the ranks differ: "dp, tp"
  std::string key;            // mesh, axes, shared coordinates, and the transport unless it is the default:
                              // "mesh(pp=2, dp=2, tp=4) dp, tp, pp=1"
  int64_t rank_in_group = 0;  // index of this rank in the group: row-major in the coordinates along the axes
  int64_t size = 1;
  std::vector<int64_t> ranks = {};  // world ranks, in the order of the group
  Transport transport = Transport::two_sided;

  // The axes, and the transport unless it is the default.
  std::string name() const { return transport == Transport::two_sided ? axes : axes + " " + name_of(transport); }
};

std::vector<ProcessGroup> process_groups_of(const ProgramTable& program, int64_t rank);

}  // namespace hw
