// Collectives on dims that may be sharded unevenly. If all shards are equal, all_gather and reduce_scatter are one NCCL
// collective. Otherwise, each is an NCCL group with one call per non-empty shard. all_to_all always has one send or receive per
// non-empty shard. Each rank knows all sizes, so the calls of all ranks match.
#pragma once
#include <nccl.h>

#include <cstdint>

#include "hostweave/channel.h"
#include "hostweave/index.h"

namespace hw {

// A dim of n indices, `width` elements each, sharded over a process group. The shards are consecutive.
struct Shared {
  int64_t n;
  int64_t width;

  bool is_even(const Channel& channel) const { return n % channel.size() == 0; }
  // Offset and size of a rank's shard, in elements.
  int64_t offset(const Channel& channel, int64_t rank) const { return local_begin(n, channel.size(), rank) * width; }
  int64_t count(const Channel& channel, int64_t rank) const { return local_size(n, channel.size(), rank) * width; }
};

// Calls post(rank, offset, count) for each rank with a non-empty shard, inside one NCCL group.
template <class Post>
ncclResult_t group_of_blocks(const Shared& blocks, const Channel& channel, Post post) {
  ncclResult_t result = ncclGroupStart();
  for (int rank = 0; rank < channel.size() && result == ncclSuccess; ++rank) {
    const int64_t count = blocks.count(channel, rank);
    if (count > 0) result = post(rank, blocks.offset(channel, rank), count);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

template <class T>
ncclResult_t all_gather(const T* src, T* dst, const Shared& blocks, ncclDataType_t type, const Channel& channel,
                        cudaStream_t stream) {
  if (blocks.is_even(channel)) return ncclAllGather(src, dst, blocks.count(channel, 0), type, channel.comm(), stream);
  return group_of_blocks(blocks, channel, [&](int rank, int64_t offset, int64_t count) {
    return ncclBroadcast(src, dst + offset, count, type, rank, channel.comm(), stream);
  });
}

template <class T>
ncclResult_t reduce_scatter(const T* src, const Shared& blocks, T* dst, ncclDataType_t type, ncclRedOp_t op,
                            const Channel& channel, cudaStream_t stream) {
  if (blocks.is_even(channel)) return ncclReduceScatter(src, dst, blocks.count(channel, 0), type, op, channel.comm(), stream);
  return group_of_blocks(blocks, channel, [&](int rank, int64_t offset, int64_t count) {
    return ncclReduce(src + offset, dst, count, type, op, rank, channel.comm(), stream);
  });
}

// Posts sends and receives in two inner groups. Call this function inside an NCCL group, because both inner groups must progress
// together.
template <class T>
ncclResult_t all_to_all(const T* src, const Shared& sent, T* dst, const Shared& received, ncclDataType_t type,
                        const Channel& channel, cudaStream_t stream) {
  const ncclResult_t result = group_of_blocks(sent, channel, [&](int rank, int64_t offset, int64_t count) {
    return ncclSend(src + offset, count, type, rank, channel.comm(), stream);
  });
  if (result != ncclSuccess) return result;
  return group_of_blocks(received, channel, [&](int rank, int64_t offset, int64_t count) {
    return ncclRecv(dst + offset, count, type, rank, channel.comm(), stream);
  });
}

}  // namespace hw
