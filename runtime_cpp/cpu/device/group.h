// What the making of communicators needs of groups, and the other way round.
#pragma once
#include <memory>

#include "communicator.h"

namespace hostweave::cpu {

bool in_group();
void wait_at_group_end(std::shared_ptr<ProcessGroup> process_group);
ncclResult_t wait_for_process_group(const ProcessGroup& process_group);  // until all its ranks have come

}  // namespace hostweave::cpu
