#include "hostweave/process_group.h"

#include <algorithm>
#include <ranges>

namespace hw {
namespace {

// Process group of the rank with number `index` in the mesh of the channel.
ProcessGroup process_group_of(const MeshChannel& channel, int64_t index) {
  const auto& [mesh, names, mesh_axes, ranks, transport] = channel;
  const std::string axes = names;
  std::vector<int64_t> coordinates(mesh_axes.size());
  for (size_t i = mesh_axes.size(); i-- > 0;) {
    coordinates[i] = index % mesh_axes[i].size;
    index /= mesh_axes[i].size;
  }
  ProcessGroup process_group{.mesh = mesh, .axes = axes, .key = std::string(mesh) + " " + axes, .transport = transport};
  std::vector<bool> common(mesh_axes.size(), true);
  std::vector<size_t> along;
  for (size_t begin = 0, end; begin < axes.size(); begin = end + 2) {
    end = std::min(axes.find(", ", begin), axes.size());
    for (size_t i = 0; i < mesh_axes.size(); ++i) {
      if (axes.compare(begin, end - begin, mesh_axes[i].name) != 0) continue;
      common[i] = false;
      along.push_back(i);
      process_group.rank_in_group = process_group.rank_in_group * mesh_axes[i].size + coordinates[i];
      process_group.size *= mesh_axes[i].size;
    }
  }
  for (size_t i = 0; i < mesh_axes.size(); ++i) {
    if (common[i]) process_group.key += std::string(", ") + mesh_axes[i].name + "=" + std::to_string(coordinates[i]);
  }
  if (transport != Transport::two_sided) process_group.key += std::string(" ") + name_of(transport);
  for (int64_t member = 0; member < process_group.size; ++member) {
    int64_t rest = member, rank = 0;
    for (const size_t i : std::views::reverse(along)) {
      coordinates[i] = rest % mesh_axes[i].size;
      rest /= mesh_axes[i].size;
    }
    for (size_t i = 0; i < mesh_axes.size(); ++i) rank = rank * mesh_axes[i].size + coordinates[i];
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
