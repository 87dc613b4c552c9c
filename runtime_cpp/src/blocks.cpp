#include "hostweave/blocks.h"

#include <utility>

namespace hw {

Blocks::Block Blocks::operator[](int64_t number) const {
  const size_t ndim = dims_.size();
  Block block{std::vector<int64_t>(ndim), std::vector<int64_t>(ndim), 0, 1};
  for (size_t i = ndim; i-- > 0; number /= dims_[i].blocks) {
    const int64_t at = number % dims_[i].blocks;
    block.start[i] = dims_[i].start(at);
    block.length[i] = dims_[i].start(at + 1) - block.start[i];
  }
  // Before it are, in each dim, those that begin earlier there and have the same place in the dims before.
  for (size_t i = 0; i < ndim; ++i) {
    block.offset = block.offset * dims_[i].size + block.count * block.start[i];
    block.count *= block.length[i];
  }
  return block;
}

// Rows that lie equally far from one another go in one call: those of the last two dims that are cut, and of what is between.
cudaError_t Blocks::copy(const void* src, void* dst, size_t itemsize, bool packs, cudaStream_t stream) const {
  int64_t blocks = 1;
  size_t inner = 0, outer = 0;  // the last dim that is cut, and the one before
  for (size_t i = 0; i < dims_.size(); ++i) {
    blocks *= dims_[i].blocks;
    if (dims_[i].blocks > 1) outer = std::exchange(inner, i);
  }
  for (int64_t number = 0; number < blocks; ++number) {
    const Block block = (*this)[number];
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
