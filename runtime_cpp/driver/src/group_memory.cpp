#include "hostweave/group_memory.h"

#include <exception>
#include <numeric>

#include "hostweave/check.h"
#include "target.h"

namespace hw {

// The rank stores the channel of all ranks of a group under these names, instead of a mesh and axes of a program.
constexpr char kGroup[] = "group", kRank[] = "rank";

std::string GroupMemory::connect(Member& member, const ncclUniqueId& id, double timeout_seconds) {
  const Member::Use use(member);
  Rank& rank = member.rank();
  if (!rank.has_channel(kGroup, kRank, Transport::peer)) {
    ProcessGroup all{.mesh = kGroup, .axes = kRank, .key = "group", .rank_in_group = rank.index(), .size = rank.size()};
    all.transport = Transport::peer;
    all.ranks.resize(rank.size());
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    member.connect(all, id, timeout_seconds);
  }
  return why_out_of_reach(rank.channel(kGroup, kRank, rank.size(), Transport::peer));
}

GroupMemory::GroupMemory(Member& member)
    : member_(member), channel_(member.rank().channel(kGroup, kRank, member.rank().size(), Transport::peer)) {}

GroupMemory::GroupMemory(Member& member, size_t bytes) : GroupMemory(member) {  // After an error, the destructor runs.
  const Member::Use use(member);
  const size_t total = whole_pieces(bytes);
  data_ = allocate_window(&channel_, total);
  register_window(channel_, data_, total, registered_);
  member.rank().share({static_cast<char*>(data_), total, registered_.peers});
}

GroupMemory::~GroupMemory() {
  if (!data_) return;
  try {
    const Member::Use use(member_, true);
    if (channel_.peers()->is_stuck()) return;
    member_.rank().unshare(static_cast<char*>(data_));
    HW_CHECK(cudaDeviceSynchronize());
    release_window(data_, {registered_});
  } catch (const std::exception&) {
    // A destructor must not throw. The memory stays allocated if the device has failed.
  }
}

}  // namespace hw
