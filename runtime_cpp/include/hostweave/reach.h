// Of channels whose ranks write to each other's memory what those need to know who make and abort their communicators.
#pragma once
#include <nccl.h>

#include <string>
#include <vector>

#include "hostweave/channel.h"

namespace hw {

// Why the ranks of a channel cannot write to each other's memory, by what NCCL knows of its communicator; "" where they can, or
// where that shows when windows are registered.
std::string why_out_of_reach(const Channel& channel);

// Aborts communicators, whose windows nobody may touch afterwards, and for which no kernel waits any longer.
void abort_with_windows(const std::vector<ncclComm_t>& comms);

}  // namespace hw
