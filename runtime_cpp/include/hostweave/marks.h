// Marks for measuring a program. A mark records the time at which a stream reaches the mark.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "hostweave/streams.h"

namespace hw {

// Collects the marks that the constructing thread makes while this object exists, in order.
class Marks {
 public:
  Marks();
  ~Marks();
  Marks(Marks&&) = delete;

  cudaError_t add(cudaStream_t stream);
  // Milliseconds from `begin` to each mark that was made since the last call of `take`. All marks must have been reached.
  std::vector<float> take(cudaEvent_t begin);

 private:
  std::deque<Event> events_;
  std::size_t used_ = 0;
};

// Enqueues a mark. Does nothing if this thread has no Marks object.
cudaError_t mark(cudaStream_t stream);

}  // namespace hw
