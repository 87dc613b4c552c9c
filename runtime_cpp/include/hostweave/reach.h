// Of channels whose ranks write to each other's memory what those need to know who make and abort their communicators.
#pragma once
#include <nccl.h>

#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/window.h"

namespace hw {

constexpr size_t kPiece = size_t{2} << 20;  // bytes, of memory that GPUs map for each other
// Rounds up to whole pieces, and to one piece of 0 bytes, since memory without a byte has no window.
constexpr size_t whole_pieces(size_t bytes) { return bytes ? (bytes + kPiece - 1) / kPiece * kPiece : kPiece; }

// Memory, as it is registered with a channel.
struct Registered {
  ncclWindow_t window = nullptr;
  std::vector<char*> peers;  // where that of each rank begins, seen from this one
};

// Registers memory of ncclMemAlloc, as all ranks of the channel do at the same time. Throws ExecutionError where NCCL does not,
// or where a peer is out of reach.
void register_window(const Channel& channel, void* data, size_t bytes, Registered& made);
// Throws ExecutionError where the NCCL that is loaded has no one-sided calls.
void expect_one_sided_calls();

// Why the ranks of a channel cannot write to each other's memory, by what NCCL knows of its communicator; "" where they can, or
// where that shows when windows are registered.
std::string why_out_of_reach(const Channel& channel);

// Aborts communicators, whose windows nobody may touch afterwards, and for which no kernel waits any longer.
void abort_with_windows(const std::vector<ncclComm_t>& comms);

}  // namespace hw
