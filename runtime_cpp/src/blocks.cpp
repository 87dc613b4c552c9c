#include "hostweave/blocks.h"

#include <utility>

namespace hw {
namespace {

struct BlockPosition : Blocks::Block {
  std::vector<int64_t> start, length;  // per dim of the tensor
};

BlockPosition position_of(int64_t number, const std::vector<Cut>& dims) {
  const size_t ndim = dims.size();
  BlockPosition block{{0, 1}, std::vector<int64_t>(ndim), std::vector<int64_t>(ndim)};
  for (size_t i = ndim; i-- > 0; number /= dims[i].blocks) {
    const int64_t at = number % dims[i].blocks;
    block.start[i] = dims[i].start(at);
    block.length[i] = dims[i].start(at + 1) - block.start[i];
  }
  // The offset is the number of elements in all earlier blocks. An earlier block has a smaller index in one dim, and equal
  // indices in all dims before that dim.
  for (size_t i = 0; i < ndim; ++i) {
    block.offset = block.offset * dims[i].size + block.count * block.start[i];
    block.count *= block.length[i];
  }
  return block;
}

}  // namespace

Blocks::Block Blocks::operator[](int64_t number) const { return position_of(number, dims_); }

// One 2-D copy covers all dims from the second-to-last split dim on.
cudaError_t Blocks::copy(const void* src, void* dst, size_t itemsize, bool packs, cudaStream_t stream) const {
  int64_t blocks = 1;
  size_t inner = 0, outer = 0;  // the last split dim, and the split dim before it
  for (size_t i = 0; i < dims_.size(); ++i) {
    blocks *= dims_[i].blocks;
    if (dims_[i].blocks > 1) outer = std::exchange(inner, i);
  }
  for (int64_t number = 0; number < blocks; ++number) {
    const BlockPosition block = position_of(number, dims_);
    size_t pitch = itemsize, row = itemsize, rows = 1;
    for (size_t i = inner; i < dims_.size(); ++i) pitch *= dims_[i].size, row *= block.length[i];
    for (size_t i = outer; i < inner; ++i) rows *= block.length[i];
    for (int64_t at = 0; at < block.count; at += rows * row / itemsize) {
      int64_t rest = at, in_tensor = 0, stride = itemsize;
      for (size_t i = dims_.size(); i-- > 0; stride *= dims_[i].size) {
        in_tensor += (block.start[i] + rest % block.length[i]) * stride;
        rest /= block.length[i];
      }
      const int64_t in_packed = (block.offset + at) * itemsize;
      const char* const from = static_cast<const char*>(src) + (packs ? in_tensor : in_packed);
      char* const to = static_cast<char*>(dst) + (packs ? in_packed : in_tensor);
      if (const cudaError_t error = cudaMemcpy2DAsync(to, packs ? row : pitch, from, packs ? pitch : row, row, rows,
                                                      cudaMemcpyDeviceToDevice, stream)) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace hw
