// Which ranks share the channels of a program.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "hostweave/abi.h"

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
  std::string name() const { return transport == Transport::two_sided ? axes : axes + " " + name_of(transport); }
};

// The process groups of `rank` whose channels the program uses.
std::vector<ProcessGroup> process_groups_of(const ProgramTable& program, int64_t rank);

}  // namespace hw
