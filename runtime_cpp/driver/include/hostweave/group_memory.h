// Memory of this rank that the other ranks of its group read and write where it lies.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <string>

#include "hostweave/member.h"
#include "hostweave/reach.h"

namespace hw {

class GroupMemory {
 public:
  // Makes the channel of all ranks of the group, if there is none. All ranks call it together. Gives why they cannot reach each
  // other's memory, the same on all; "" where they can.
  static std::string connect(Member& member, const ncclUniqueId& id, double timeout_seconds);

  // All ranks make it together, after `connect`, with as many bytes. The member outlives it.
  GroupMemory(Member& member, size_t bytes);
  // Waits for what the device has in flight. Where the group has failed a stream may wait for a peer for ever, and nothing is
  // freed.
  ~GroupMemory();
  GroupMemory(GroupMemory&&) = delete;

  void* data() const { return data_; }

 private:
  Member& member_;
  const Channel& channel_;
  void* data_ = nullptr;
  Registered registered_;
};

}  // namespace hw
