// Peer memory: ranks of one host copy from and to each other's memory, and signal each other by stream memory operations. On
// GPUs, this code uses NCCL only for the type ncclUniqueId.
//
// There is one word, 0 or 1, per sender, receiver and signal number. A signal waits until the word is 0, and then sets the word
// to 1. A wait waits until the word is 1, and then sets the word to 0. All values are constants, so a CUDA graph can be
// replayed. The words are in host memory, so a rank can end the waits of its streams after a peer has exited.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hw {

// One rank of a process group. Only one thread at a time may use the object, with the rank's device current. Any thread may
// call `abort`.
class PeerGroup {
 public:
  static constexpr int kNumbers = 64;  // signal numbers between a sender and a receiver

  // One rank's mapping of the memory of all ranks, made by a collective `map`.
  struct Mapping {
    PeerGroup* group = nullptr;
    uint32_t number = 0;             // number of the mapping in its group
    void* handle = nullptr;          // defined by the target
    std::vector<char*> begins = {};  // base of each rank's memory, in this rank's address space
  };

  // Makes an id for a new group. One rank calls this function and sends the id to the other ranks.
  static ncclUniqueId new_id();

  // Collective: joins the group of `id`. Throws ExecutionError after a timeout, if the id, rank or size is wrong, if another
  // rank fails, or if `*aborted` is set.
  PeerGroup(const ncclUniqueId& id, int64_t rank, int64_t size, double timeout_seconds,
            const std::atomic<bool>* aborted = nullptr);
  ~PeerGroup();
  PeerGroup(PeerGroup&&) = delete;

  // Returns why some rank cannot map the memory of its peers or cannot signal its peers. Returns "" if all ranks can. All ranks
  // return the same text.
  const std::string& why_out_of_reach() const;

  // Allocates memory that the other ranks can map.
  void* allocate(size_t bytes);
  // Collective: maps the memory of all ranks. Each rank passes memory that its `allocate` returned. All sizes must be equal.
  // After an error, `free` still needs `mapping`.
  void map(void* data, size_t bytes, Mapping& mapping);
  // Unmaps the memory of the peers without waiting. Frees `data` in this or a later call of `map` or `free`, once no peer maps
  // `data`. After an abort, frees `data` some seconds later even if a peer still maps `data`.
  static void free(void* data, const std::vector<Mapping>& mappings);

  cudaError_t signal(int64_t peer, int number, cudaStream_t stream);
  cudaError_t wait_signal(int64_t peer, int number, cudaStream_t stream);

  // Ends all waits for other ranks, on the host and on this rank's device. The group is unusable afterwards.
  void abort();
  // True if the group was aborted, and this rank's device may still run work. Memory cannot be freed then.
  bool is_stuck() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hw
