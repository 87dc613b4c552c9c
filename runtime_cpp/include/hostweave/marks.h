// Marks for measuring a program. A mark records the time at which a stream reaches the mark.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "hostweave/streams.h"

namespace hw {

// Collects the marks of the constructing thread, in order, while this object exists.
class Marks {
 public:
  Marks();
  ~Marks();
  Marks(Marks&&) = delete;

  cudaError_t add(cudaStream_t stream);
  // Milliseconds from `begin` to each mark added since the last call of `take`. The streams must have reached all of these marks.
  std::vector<float> take(cudaEvent_t begin);

 private:
  std::deque<Event> events_;
  std::size_t used_ = 0;
};

// Enqueues a mark. Does nothing if this thread has no Marks object.
cudaError_t mark(cudaStream_t stream);

}  // namespace hw
