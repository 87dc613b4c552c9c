#include "hostweave/process_group.h"

#include <algorithm>
#include <ranges>

namespace hw {
namespace {

// Process group of the rank with number `index` in the mesh of the channel.
ProcessGroup process_group_of(const MeshChannel& channel, int64_t index) {
  const auto& [mesh, names, mesh_axes, ranks, transport] = channel;
  const std::string axes = names;
  ProcessGroup process_group{.mesh = mesh, .axes = axes, .key = std::string(mesh) + " " + axes, .transport = transport};
  std::vector<size_t> along;
  for (size_t begin = 0, end; begin < axes.size(); begin = end + 2) {
    end = std::min(axes.find(", ", begin), axes.size());
    along.push_back(std::ranges::find(mesh_axes, axes.substr(begin, end - begin), &Axis::name) - mesh_axes.begin());
    process_group.size *= mesh_axes[along.back()].size;
  }
  std::vector<int64_t> steps(mesh_axes.size(), 1);  // distance in the mesh of two ranks that are neighbours along an axis
  for (size_t i = mesh_axes.size(); i-- > 1;) steps[i - 1] = steps[i] * mesh_axes[i].size;
  int64_t origin = 0;  // the group's first rank in the mesh
  for (size_t i = 0; i < mesh_axes.size(); ++i) {
    if (std::ranges::find(along, i) != along.end()) continue;
    const int64_t coordinate = index / steps[i] % mesh_axes[i].size;
    origin += coordinate * steps[i];
    process_group.key += std::string(", ") + mesh_axes[i].name + "=" + std::to_string(coordinate);
  }
  if (transport != Transport::two_sided) process_group.key += std::string(" ") + name_of(transport);
  for (int64_t member = 0; member < process_group.size; ++member) {
    int64_t rest = member, rank = origin;
    for (const size_t i : std::views::reverse(along)) {
      rank += rest % mesh_axes[i].size * steps[i];
      rest /= mesh_axes[i].size;
    }
    if (rank == index) process_group.rank_in_group = member;
    process_group.ranks.push_back(ranks.empty() ? rank : ranks[rank]);
  }
  return process_group;
}

}  // namespace

std::vector<ProcessGroup> process_groups_of(const ProgramTable& program, int64_t rank) {
  std::vector<ProcessGroup> process_groups;
  for (const MeshChannel& one : program.channels) {
    const auto found = std::ranges::find(one.ranks, rank);
    if (one.ranks.empty())
      process_groups.push_back(process_group_of(one, rank));
    else if (found != one.ranks.end())
      process_groups.push_back(process_group_of(one, found - one.ranks.begin()));
  }
  return process_groups;
}

}  // namespace hw
