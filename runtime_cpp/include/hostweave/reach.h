// Windows of channels whose ranks access each other's memory: registration, checks and aborts.
#pragma once
#include <nccl.h>

#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/peer.h"
#include "hostweave/window.h"

namespace hw {

constexpr size_t kPiece = size_t{2} << 20;  // granularity in bytes of memory that GPUs map for each other
// Rounds up to whole pieces, and to at least one piece: a window must not be empty.
constexpr size_t whole_pieces(size_t bytes) { return bytes ? (bytes + kPiece - 1) / kPiece * kPiece : kPiece; }

// Registration of memory with a channel.
struct Registered {
  const Channel* channel = nullptr;
  ncclWindow_t window = nullptr;    // with transport `one_sided`
  PeerGroup::Mapping mapping = {};  // with transport `peer`
  std::vector<char*> peers;         // base of each rank's memory, in this rank's address space
};

// Allocates memory that this channel and other channels with the same transport can register. `channel` is null if this rank is
// in no channel.
void* allocate_window(const Channel* channel, size_t bytes);
// Collective: registers memory that `allocate_window` returned. Throws ExecutionError if the registration
// fails, or if this rank cannot access the memory of a peer.
void register_window(const Channel& channel, void* data, size_t bytes, Registered& made);
// Frees registered memory. With transport `peer`, the memory may be freed later; see PeerGroup::free.
void release_window(void* data, const std::vector<Registered>& registered);
// Throws ExecutionError if the loaded NCCL has no one-sided calls.
void expect_one_sided_calls();

// Reason why the ranks of a channel cannot access each other's memory. Returns "" if they can, or if NCCL does not tell.
std::string why_out_of_reach(const Channel& channel);
// Collective: tries a registration, unless the transport is `peer`. Returns the reason why the registration fails, or "".
std::string why_no_windows(const Channel& channel);

// Aborts communicators, and ends the waits of kernels for ranks of these communicators. The windows of these communicators are
// unusable afterwards.
void abort_with_windows(const std::vector<ncclComm_t>& comms);

}  // namespace hw
