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

// Calls copy(row, where it begins in the tensor, where it begins among packed blocks, distance of rows in the tensor, how many) for
// rows that lie as far from one another.
template <class Copy>
cudaError_t Blocks::for_rows(Copy copy) const {
  int64_t blocks = 1;
  size_t inner = 0, outer = 0;  // the last dim that is cut, and the one before
  for (size_t i = 0; i < dims_.size(); ++i) {
    blocks *= dims_[i].blocks;
    if (dims_[i].blocks > 1) outer = std::exchange(inner, i);
  }
  for (int64_t number = 0; number < blocks; ++number) {
    const Block block = (*this)[number];
    if (block.count == 0) continue;
    int64_t pitch = 1, row = 1, rows = 1;
    for (size_t i = inner; i < dims_.size(); ++i) pitch *= dims_[i].size, row *= block.length[i];
    for (size_t i = outer; i < inner; ++i) rows *= block.length[i];
    for (int64_t at = 0; at < block.count; at += rows * row) {
      int64_t rest = at, offset = 0, stride = 1;
      for (size_t i = dims_.size(); i-- > 0; stride *= dims_[i].size) {
        offset += (block.start[i] + rest % block.length[i]) * stride;
        rest /= block.length[i];
      }
      if (const cudaError_t error = copy(row, offset, block.offset + at, pitch, rows)) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t Blocks::pack(const void* src, void* dst, size_t itemsize, cudaStream_t stream) const {
  return for_rows([=](int64_t row, int64_t at, int64_t packed_at, int64_t pitch, int64_t rows) {
    return cudaMemcpy2DAsync(static_cast<char*>(dst) + packed_at * itemsize, row * itemsize,
                             static_cast<const char*>(src) + at * itemsize, pitch * itemsize, row * itemsize, rows,
                             cudaMemcpyDeviceToDevice, stream);
  });
}

cudaError_t Blocks::unpack(const void* src, void* dst, size_t itemsize, cudaStream_t stream) const {
  return for_rows([=](int64_t row, int64_t at, int64_t packed_at, int64_t pitch, int64_t rows) {
    return cudaMemcpy2DAsync(static_cast<char*>(dst) + at * itemsize, pitch * itemsize,
                             static_cast<const char*>(src) + packed_at * itemsize, row * itemsize, row * itemsize, rows,
                             cudaMemcpyDeviceToDevice, stream);
  });
}

}  // namespace hw
