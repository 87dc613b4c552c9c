// Channel of a process group, seen from one rank: an NCCL communicator or, with transport `peer`, a PeerGroup.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hostweave/call_log.h"

namespace hw {

enum class Transport { two_sided, one_sided, peer };
const char* name_of(Transport transport);

class PeerGroup;

// Memory that the application shares between ranks: the memory of this rank, and the memory of each peer as mapped by this rank.
struct SharedMemory {
  char* data = nullptr;
  size_t bytes = 0;
  std::vector<char*> peers;  // base of each rank's memory, in this rank's address space
};

// Move of a block between meshes: block `sent` of rank `sender` becomes block `received` of rank `receiver`.
struct Route {
  int sender;
  int64_t sent;
  int receiver;
  int64_t received;
};

class Channel;

// The communicator of a channel, as an argument of NCCL calls. The conversion to ncclComm_t adds the channel to the call log.
class Communicator {
 public:
  explicit Communicator(const Channel& channel) : channel_(channel) {}
  operator ncclComm_t() const;
  const Channel& channel() const { return channel_; }

 private:
  const Channel& channel_;
};

class Channel {
 public:
  // Borrows the communicator. `ranks` are the world ranks of the process group, if known.
  Channel(ncclComm_t comm, int64_t rank, int64_t size, std::vector<int64_t> ranks = {})
      : comm_(comm), rank_(rank), size_(size), ranks_(std::move(ranks)) {}
  // Channel with transport `peer`. Borrows the group; there is no communicator.
  Channel(PeerGroup& peers, int64_t rank, int64_t size, std::vector<int64_t> ranks = {})
      : peers_(&peers), rank_(rank), size_(size), ranks_(std::move(ranks)) {}
  ncclComm_t handle() const { return comm_; }
  Communicator comm() const { return Communicator(*this); }
  PeerGroup* peers() const { return peers_; }  // null for other transports
  // Identity of the communicator or group, the same for all programs of the rank that use the channel.
  const void* key() const { return peers_ ? static_cast<const void*>(peers_) : comm_; }
  int64_t rank() const { return rank_; }  // this rank's index in the process group
  int64_t size() const { return size_; }
  // World ranks of the process group; empty if they are unknown. `world_rank` then returns its argument.
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t world_rank(int64_t rank) const { return ranks_.empty() ? rank : ranks_[rank]; }
  // Axes along which the ranks of the process group differ: "dp, tp".
  const char* name() const { return name_; }
  void set_name(const char* name) { name_ = name; }  // `name` must outlive the channel

  // `signal` and `wait_signal` need transport `peer`. `signal` enqueues a signal to a peer. The stream first waits until the peer
  // has consumed the previous signal of this number.
  cudaError_t signal(int64_t peer, int number, cudaStream_t stream) const;
  // Enqueues a wait that consumes the peer's signal of this number.
  cudaError_t wait_signal(int64_t peer, int number, cudaStream_t stream) const;

  // Address in a peer's memory that corresponds to `address`; null if `address` is not in shared memory, or if world ranks are
  // unknown.
  char* on_peer(int64_t peer, const char* address) const;
  // Sets the shared memory that `on_peer` searches.
  void set_shared(const std::vector<SharedMemory>* shared) { shared_ = shared; }

 private:
  ncclComm_t comm_ = nullptr;
  PeerGroup* peers_ = nullptr;
  int64_t rank_;
  int64_t size_;
  std::vector<int64_t> ranks_;
  const std::vector<SharedMemory>* shared_ = nullptr;
  const char* name_ = "";
};

inline Communicator::operator ncclComm_t() const {
  if (CallLog* const log = CallLog::current()) log->over(channel_);
  return channel_.handle();
}

// Overloads of NCCL's functions that also add the channel and the peer to the call log.
inline ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, const Communicator& comm,
                             cudaStream_t stream) {
  if (CallLog* const log = CallLog::current()) log->with_peer(peer);
  return ::ncclSend(from, count, type, peer, static_cast<ncclComm_t>(comm), stream);
}
inline ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, const Communicator& comm,
                             cudaStream_t stream) {
  if (CallLog* const log = CallLog::current()) log->with_peer(peer);
  return ::ncclRecv(to, count, type, peer, static_cast<ncclComm_t>(comm), stream);
}

const Channel& no_channel();  // for ranks outside the process group

}  // namespace hw
