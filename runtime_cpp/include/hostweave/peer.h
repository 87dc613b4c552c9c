// Peer memory: ranks of one host that read and write each other's memory with copies, and signal each other with words that
// streams write and wait for. It needs no NCCL.
//
// Each sender, receiver and number has one word, which is 0 or 1. A signal waits until the word is 0 and sets it to 1; a wait
// waits until it is 1 and sets it to 0. All values are constants, so calls and replays of a CUDA graph use the same words.
// The words lie in memory of the host, so that a rank whose peer is gone can end the waits of its own streams.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hw {

// One rank of a process group. Used by one thread at a time, except for `abort`, with the rank's device current.
class PeerGroup {
 public:
  static constexpr int kNumbers = 64;  // of signals

  // Memory of all ranks of a group, mapped by one of them.
  struct Mapping {
    PeerGroup* group = nullptr;
    uint32_t number = 0;             // of the mapping in its group
    void* handle = nullptr;          // of the target
    std::vector<char*> begins = {};  // where the memory of each rank begins, seen from this one
  };

  // An id for a new group. One rank makes it, and tells the others.
  static ncclUniqueId new_id();

  // Joins the group of that id, as all of its ranks do at the same time. Throws ExecutionError if some do not come in time, or
  // if the process that made the id cannot be reached.
  PeerGroup(const ncclUniqueId& id, int64_t rank, int64_t size, double timeout_seconds);
  ~PeerGroup();
  PeerGroup(PeerGroup&&) = delete;

  // Why some ranks cannot map each other's memory or signal each other: the same on all ranks. "" if all can.
  const std::string& why_out_of_reach() const;

  // Memory that the other ranks can map.
  void* allocate(size_t bytes);
  // Maps such memory of all ranks. All ranks call it at the same time, with equal sizes.
  Mapping map(void* data, size_t bytes);
  // Unmaps the peers' memory, and frees `data` as soon as the peers have unmapped it, too. Does not wait for them.
  static void free(void* data, const std::vector<Mapping>& mappings);

  cudaError_t signal(int64_t peer, int number, cudaStream_t stream);
  cudaError_t wait_signal(int64_t peer, int number, cudaStream_t stream);

  // From any thread: ends what waits for other ranks, on the host and on this rank's device. The group is of no use any more.
  void abort();
  // True if the group was aborted and this rank's device still waits for others, so that nothing can be freed.
  bool is_stuck() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hw
