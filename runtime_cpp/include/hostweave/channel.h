// A process group of ranks that communicate, seen from one of them.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hw {

enum class Transport { two_sided, one_sided };

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
  ncclComm_t comm() const { return comm_; }
  int64_t rank() const { return rank_; }  // this rank's place in the process group
  int64_t size() const { return size_; }

  // The same place in the memory of a peer, where it lies in memory that all ranks share; else null.
  char* on_peer(int64_t peer, const char* place) const;
  // Of the rank that has the channel.
  void set_shared(const std::vector<SharedMemory>* shared) { shared_ = shared; }

 private:
  ncclComm_t comm_;
  int64_t rank_;
  int64_t size_;
  std::vector<int64_t> ranks_;
  const std::vector<SharedMemory>* shared_ = nullptr;
};

inline const Channel kNoChannel{nullptr, 0, 0};  // of a rank that is not in the process group

}  // namespace hw
