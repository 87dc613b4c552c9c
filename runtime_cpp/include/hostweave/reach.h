// Of channels whose ranks write to each other's memory what those need to know who make and abort their communicators.
#pragma once
#include <nccl.h>

#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/peer.h"
#include "hostweave/window.h"

namespace hw {

constexpr size_t kPiece = size_t{2} << 20;  // bytes, of memory that GPUs map for each other
// Rounds up to whole pieces, and to one piece of 0 bytes, since memory without a byte has no window.
constexpr size_t whole_pieces(size_t bytes) { return bytes ? (bytes + kPiece - 1) / kPiece * kPiece : kPiece; }

// Memory, as it is registered with a channel.
struct Registered {
  const Channel* channel = nullptr;
  ncclWindow_t window = nullptr;    // of the transport one_sided
  PeerGroup::Mapping mapping = {};  // of the transport peer
  std::vector<char*> peers;         // where the memory of each rank begins, seen from this one
};

// Memory to be registered with a channel, and with others of the same transport; null stands for none.
void* allocate_window(const Channel* channel, size_t bytes);
// Registers such memory, as all ranks of the channel do at the same time. Throws ExecutionError if NCCL or the GPU cannot.
void register_window(const Channel& channel, void* data, size_t bytes, Registered& made);
// Frees memory that was registered. The peers of the transport peer may still have it mapped.
void release_window(void* data, const std::vector<Registered>& registered);
// Throws ExecutionError where the NCCL that is loaded has no one-sided calls.
void expect_one_sided_calls();

// Why the ranks of a channel cannot write to each other's memory; "" if they can, or if only registering windows shows it.
std::string why_out_of_reach(const Channel& channel);
// Why memory cannot be registered with a channel, which all of its ranks try together; "" if it can.
std::string why_no_windows(const Channel& channel);

// Aborts communicators, whose windows nobody may touch afterwards, and for which no kernel waits any longer.
void abort_with_windows(const std::vector<ncclComm_t>& comms);

}  // namespace hw
