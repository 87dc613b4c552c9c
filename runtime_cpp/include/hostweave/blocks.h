// Tensors split into the blocks that go to different ranks. The last blocks of a dim may be short or empty.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/index.h"

namespace hw {

// A dim of `global_size` indices, divided into `blocks` blocks. This rank holds `size` indices from index `begin` on.
struct Cut {
  int64_t size;
  int64_t blocks = 1;
  int64_t global_size = size;
  int64_t begin = 0;

  // Local start of a block. start(blocks) is the local end of the dim.
  int64_t start(int64_t block) const { return clamped(local_begin(global_size, blocks, block) - begin, 0, size); }
};

// Blocks of a row-major tensor, in row-major order. A packed buffer has the blocks one after another; each block is row-major.
class Blocks {
 public:
  Blocks(std::initializer_list<Cut> dims) : dims_(dims) {}

  struct Block {
    int64_t offset;  // offset in the packed buffer, in elements
    int64_t count;
  };
  Block operator[](int64_t number) const;

  // Packs the tensor into blocks if `packs`, and otherwise unpacks the blocks.
  cudaError_t copy(const void* src, void* dst, size_t itemsize, bool packs, cudaStream_t stream) const;

 private:
  std::vector<Cut> dims_;
};

template <class T>
cudaError_t pack(const T* src, T* dst, const Blocks& blocks, cudaStream_t stream) {
  return blocks.copy(src, dst, sizeof(T), true, stream);
}
template <class T>
cudaError_t unpack(const T* src, T* dst, const Blocks& blocks, cudaStream_t stream) {
  return blocks.copy(src, dst, sizeof(T), false, stream);
}

// send_blocks sends, and recv_blocks receives, the packed blocks that the routes assign to this rank. Both functions skip empty
// blocks. Call both functions inside an NCCL group.
template <class T, size_t n>
ncclResult_t send_blocks(const T* src, const Blocks& blocks, const Route (&routes)[n], ncclDataType_t type,
                         const Channel& channel, cudaStream_t stream) {
  for (const Route& route : routes) {
    if (route.sender != channel.rank()) continue;
    const Blocks::Block block = blocks[route.sent];
    if (block.count == 0) continue;
    if (const auto error = ncclSend(src + block.offset, block.count, type, route.receiver, channel.comm(), stream)) return error;
  }
  return ncclSuccess;
}
template <class T, size_t n>
ncclResult_t recv_blocks(T* dst, const Blocks& blocks, const Route (&routes)[n], ncclDataType_t type, const Channel& channel,
                         cudaStream_t stream) {
  for (const Route& route : routes) {
    if (route.receiver != channel.rank()) continue;
    const Blocks::Block block = blocks[route.received];
    if (block.count == 0) continue;
    if (const auto error = ncclRecv(dst + block.offset, block.count, type, route.sender, channel.comm(), stream)) return error;
  }
  return ncclSuccess;
}

}  // namespace hw
