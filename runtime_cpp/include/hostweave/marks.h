// Marks of a program that is measured: when a stream comes to each of them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "hostweave/streams.h"

namespace hw {

// While one lives, it has the marks that its thread makes, in their order.
class Marks {
 public:
  Marks();
  ~Marks();
  Marks(Marks&&) = delete;

  cudaError_t add(cudaStream_t stream);
  // Milliseconds from `begin` to each mark since the last call of this, all of which streams have come to.
  std::vector<float> take(cudaEvent_t begin);

 private:
  std::deque<Event> events_;
  std::size_t used_ = 0;
};

// A mark behind what the stream holds. Nothing where no Marks lives.
cudaError_t mark(cudaStream_t stream);

}  // namespace hw
