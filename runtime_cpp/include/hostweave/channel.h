// A process group of ranks that communicate, seen from one of them.
#pragma once
#include <nccl.h>

#include <cstdint>

namespace hw {

enum class Transport { two_sided, one_sided };

class Channel {
 public:
  // Borrows the communicator.
  Channel(ncclComm_t comm, int64_t rank, int64_t size) : comm_(comm), rank_(rank), size_(size) {}
  ncclComm_t comm() const { return comm_; }
  int64_t rank() const { return rank_; }  // this rank's place in the process group
  int64_t size() const { return size_; }

 private:
  ncclComm_t comm_;
  int64_t rank_;
  int64_t size_;
};

inline const Channel kNoChannel{nullptr, 0, 0};  // of a rank that is not in the process group

}  // namespace hw
