// Memory of this rank that the other ranks of its group access in place.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <string>

#include "hostweave/member.h"
#include "hostweave/reach.h"

namespace hw {

class GroupMemory {
 public:
  // Collective: creates the channel of all ranks of the group if there is none. Returns the reason why the ranks cannot access
  // each other's memory, or "". All ranks return the same reason.
  static std::string connect(Member& member, const ncclUniqueId& id, double timeout_seconds);

  // Collective: allocates memory that the other ranks can access. All ranks pass the same size. Call `connect` before. The member
  // must outlive this object.
  GroupMemory(Member& member, size_t bytes);
  // Waits for the device, and frees the memory. Frees nothing after a failure of the group, because a stream may wait for a peer
  // forever.
  ~GroupMemory();
  GroupMemory(GroupMemory&&) = delete;

  void* data() const { return data_; }

 private:
  explicit GroupMemory(Member& member);

  Member& member_;
  const Channel& channel_;
  void* data_ = nullptr;
  Registered registered_;
};

}  // namespace hw
