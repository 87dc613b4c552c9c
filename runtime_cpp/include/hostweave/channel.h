// A process group of ranks that communicate, seen from one of them.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hw {

enum class Transport { two_sided, one_sided, peer };
const char* name_of(Transport transport);

class PeerGroup;

// Memory of the application's that all ranks of the world reach.
struct SharedMemory {
  char* data = nullptr;
  size_t bytes = 0;
  std::vector<char*> peers;  // where each rank's begins, seen from this one
};

// How blocks of a tensor get from one mesh to another: block `sent` of what rank `sender` holds becomes block `received` of what
// rank `receiver` holds.
struct Route {
  int sender;
  int64_t sent;
  int receiver;
  int64_t received;
};

class Channel {
 public:
  // Borrows the communicator. `ranks` are the numbers in the world of those in the process group, where these are known.
  Channel(ncclComm_t comm, int64_t rank, int64_t size, std::vector<int64_t> ranks = {})
      : comm_(comm), rank_(rank), size_(size), ranks_(std::move(ranks)) {}
  // A channel of the transport peer. Borrows the group, which has no communicator.
  Channel(PeerGroup& peers, int64_t rank, int64_t size, std::vector<int64_t> ranks = {})
      : peers_(&peers), rank_(rank), size_(size), ranks_(std::move(ranks)) {}
  ncclComm_t comm() const { return comm_; }
  PeerGroup* peers() const { return peers_; }  // null on other transports
  // Identifies the communicator or the group. All programs of the rank that use the channel see the same one.
  const void* key() const { return peers_ ? static_cast<const void*>(peers_) : comm_; }
  int64_t rank() const { return rank_; }  // this rank's place in the process group
  int64_t size() const { return size_; }

  // Transport peer: the stream sets a signal of this number for a peer, once the peer has taken the one before.
  cudaError_t signal(int64_t peer, int number, cudaStream_t stream) const;
  // The stream waits for the peer's signal of this number, and takes it.
  cudaError_t wait_signal(int64_t peer, int number, cudaStream_t stream) const;

  // The same place in the memory of a peer, where it lies in memory that all ranks share; else null.
  char* on_peer(int64_t peer, const char* place) const;
  // Of the rank that has the channel.
  void set_shared(const std::vector<SharedMemory>* shared) { shared_ = shared; }

 private:
  ncclComm_t comm_ = nullptr;
  PeerGroup* peers_ = nullptr;
  int64_t rank_;
  int64_t size_;
  std::vector<int64_t> ranks_;
  const std::vector<SharedMemory>* shared_ = nullptr;
};

inline const Channel kNoChannel{ncclComm_t{}, 0, 0};  // of a rank that is not in the process group

}  // namespace hw
