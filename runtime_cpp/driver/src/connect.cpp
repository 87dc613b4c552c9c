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

// The team along `axes` of the rank at place `index` of a mesh.
Team team_of(const char* mesh, std::span<const Axis> mesh_axes, const std::string& axes, int64_t index) {
  std::vector<int64_t> coordinates(mesh_axes.size());
  for (size_t i = mesh_axes.size(); i-- > 0;) {
    coordinates[i] = index % mesh_axes[i].size;
    index /= mesh_axes[i].size;
  }
  Team team{.mesh = mesh, .axes = axes, .key = std::string(mesh) + " " + axes};
  std::vector<bool> common(mesh_axes.size(), true);
  for_each_axis(axes, [&](const std::string& axis) {
    for (size_t i = 0; i < mesh_axes.size(); ++i) {
      if (axis != mesh_axes[i].name) continue;
      common[i] = false;
      team.place = team.place * mesh_axes[i].size + coordinates[i];
      team.size *= mesh_axes[i].size;
    }
  });
  for (size_t i = 0; i < mesh_axes.size(); ++i) {
    if (common[i]) team.key += std::string(", ") + mesh_axes[i].name + "=" + std::to_string(coordinates[i]);
  }
  return team;
}

}  // namespace

std::vector<Team> teams_of(const ProgramTable& program, int64_t rank) {
  std::vector<Team> teams;
  for (const char* axes : program.teams) teams.push_back(team_of(program.mesh, program.axes, axes, rank));
  for (const SubmeshTeam& team : program.submesh_teams) {
    const auto found = std::ranges::find(team.ranks, rank);
    if (found != team.ranks.end()) {
      teams.push_back(team_of(team.mesh, team.mesh_axes, team.axes, found - team.ranks.begin()));
    }
  }
  return teams;
}

ncclUniqueId new_team_id() {
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  return id;
}

void connect(Rank& rank, const ProgramTable& program, const TeamId& id_of, const Keep& keep, double timeout_seconds) {
  for (const Team& team : teams_of(program, rank.index())) {
    if (rank.has_channel(team.mesh.c_str(), team.axes.c_str())) continue;
    const ncclComm_t comm = target::make_channel(team, id_of(team), rank.device(), timeout_seconds);
    keep(comm);
    rank.add_channel(team.mesh.c_str(), team.axes.c_str(), Channel(comm, team.place, team.size));
  }
}

}  // namespace hw
