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

// The process group along `axes` of the rank of number `index` of a mesh.
ProcessGroup process_group_of(const char* mesh, std::span<const Axis> mesh_axes, const std::string& axes, int64_t index) {
  std::vector<int64_t> coordinates(mesh_axes.size());
  for (size_t i = mesh_axes.size(); i-- > 0;) {
    coordinates[i] = index % mesh_axes[i].size;
    index /= mesh_axes[i].size;
  }
  ProcessGroup process_group{.mesh = mesh, .axes = axes, .key = std::string(mesh) + " " + axes};
  std::vector<bool> common(mesh_axes.size(), true);
  for_each_axis(axes, [&](const std::string& axis) {
    for (size_t i = 0; i < mesh_axes.size(); ++i) {
      if (axis != mesh_axes[i].name) continue;
      common[i] = false;
      process_group.rank_in_group = process_group.rank_in_group * mesh_axes[i].size + coordinates[i];
      process_group.size *= mesh_axes[i].size;
    }
  });
  for (size_t i = 0; i < mesh_axes.size(); ++i) {
    if (common[i]) process_group.key += std::string(", ") + mesh_axes[i].name + "=" + std::to_string(coordinates[i]);
  }
  return process_group;
}

}  // namespace

std::vector<ProcessGroup> process_groups_of(const ProgramTable& program, int64_t rank) {
  std::vector<ProcessGroup> process_groups;
  for (const char* axes : program.channels) process_groups.push_back(process_group_of(program.mesh, program.axes, axes, rank));
  for (const char* axes : program.one_sided_channels) {
    ProcessGroup& process_group = process_groups.emplace_back(process_group_of(program.mesh, program.axes, axes, rank));
    process_group.transport = Transport::one_sided;
    process_group.key += " one_sided";
  }
  for (const SubmeshChannel& process_group : program.submesh_channels) {
    const auto found = std::ranges::find(process_group.ranks, rank);
    if (found != process_group.ranks.end()) {
      process_groups.push_back(
          process_group_of(process_group.mesh, process_group.mesh_axes, process_group.axes, found - process_group.ranks.begin()));
    }
  }
  return process_groups;
}

ncclUniqueId new_process_group_id() {
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  return id;
}

void connect(Rank& rank, const ProgramTable& program, const ProcessGroupId& id_of, const Keep& keep, double timeout_seconds) {
  for (const ProcessGroup& process_group : process_groups_of(program, rank.index())) {
    if (rank.has_channel(process_group.mesh.c_str(), process_group.axes.c_str(), process_group.transport)) continue;
    const ncclComm_t comm = target::make_channel(process_group, id_of(process_group), rank.device(), timeout_seconds);
    keep(comm);
    rank.add_channel(process_group.mesh.c_str(), process_group.axes.c_str(),
                     Channel(comm, process_group.rank_in_group, process_group.size), process_group.transport);
  }
}

}  // namespace hw
