// What the making of communicators needs of groups, and the other way round.
#pragma once
#include <memory>

#include "communicator.h"

namespace hostweave::cpu {

bool in_group();
void wait_at_group_end(std::shared_ptr<Team> team);
ncclResult_t wait_for_team(const Team& team);  // until all its ranks have come

}  // namespace hostweave::cpu
