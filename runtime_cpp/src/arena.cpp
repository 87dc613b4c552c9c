#include "hostweave/arena.h"

#include "hostweave/check.h"

namespace hw {

Arena::~Arena() { cudaFree(data_); }

void Arena::allocate(std::initializer_list<Buffer> buffers) {
  constexpr size_t kAlignment = 256;
  const auto padded = [](size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  size_t total = 0;
  for (const Buffer& buffer : buffers) total += padded(buffer.bytes);
  if (total > bytes_) {
    HW_CHECK(cudaFree(data_));  // waits for the calls in flight
    data_ = nullptr;
    bytes_ = 0;
    HW_CHECK(cudaMalloc(&data_, total));
    bytes_ = total;
  }
  char* next = static_cast<char*>(data_);
  for (const Buffer& buffer : buffers) {
    *buffer.pointer = next;
    next += padded(buffer.bytes);
  }
}

}  // namespace hw
