// Waits for the signals of a peer that is gone.
#pragma once
#include <nccl.h>

#include "hostweave/process_group.h"

namespace hw::target {

// Notes where the signals of a new communicator arrive, with its device current, so that `abort` can give them.
void find_signals(ncclComm_t comm, const ProcessGroup& process_group);

}  // namespace hw::target
