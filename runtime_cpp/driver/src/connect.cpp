#include "hostweave/connect.h"

#include <algorithm>

#include "hostweave/check.h"
#include "world_target.h"

namespace hw {
namespace {

// "dp, tp" is split into "dp" and "tp".
template <class Use>
void for_each_axis(const std::string& axes, const Use& use) {
  for (size_t begin = 0; begin < axes.size();) {
    const size_t end = std::min(axes.find(", ", begin), axes.size());
    use(axes.substr(begin, end - begin));
    begin = end + 2;
  }
}

}  // namespace

Team team_of(const ProgramTable& program, const std::string& axes, int64_t rank) {
  std::vector<int64_t> coordinates(program.n_axes);
  for (int i = program.n_axes - 1; i >= 0; --i) {
    coordinates[i] = rank % program.axes[i].size;
    rank /= program.axes[i].size;
  }
  Team team{.axes = axes, .key = std::string(program.mesh) + " " + axes};
  std::vector<bool> common(program.n_axes, true);
  for_each_axis(axes, [&](const std::string& axis) {
    for (int i = 0; i < program.n_axes; ++i) {
      if (axis != program.axes[i].name) continue;
      common[i] = false;
      team.place = team.place * program.axes[i].size + coordinates[i];
      team.size *= program.axes[i].size;
    }
  });
  for (int i = 0; i < program.n_axes; ++i) {
    if (common[i]) team.key += std::string(", ") + program.axes[i].name + "=" + std::to_string(coordinates[i]);
  }
  return team;
}

ncclUniqueId new_team_id() {
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  return id;
}

void connect(Rank& rank, const ProgramTable& program, const TeamId& id_of, const Keep& keep, double timeout_seconds) {
  for (int i = 0; i < program.n_teams; ++i) {
    const char* const axes = program.teams[i];
    if (rank.has_channel(program.mesh, axes)) continue;
    const Team team = team_of(program, axes, rank.index());
    const ncclComm_t comm = target::make_channel(team, id_of(team), rank.device(), timeout_seconds);
    keep(comm);
    rank.add_channel(program.mesh, axes, Channel(comm, team.place, team.size));
  }
}

}  // namespace hw
