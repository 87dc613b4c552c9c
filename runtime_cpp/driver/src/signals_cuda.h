// Aborts the waits for signals from a peer that has exited.
#pragma once
#include <nccl.h>

#include "hostweave/process_group.h"

namespace hw::target {

// Records where the signals of a new communicator arrive, so that `abort` can set them. Its device must be current.
void find_signals(ncclComm_t comm, const ProcessGroup& process_group);

}  // namespace hw::target
