// Memory of the signals that NCCL's one-sided calls wait for.
#pragma once
#include <nccl.h>

#include "hostweave/process_group.h"

namespace hw::target {

// Finds the signals of a new communicator, so that `abort` can set the signals. The device of the communicator must be current.
void find_signals(ncclComm_t comm, const ProcessGroup& process_group);

}  // namespace hw::target
