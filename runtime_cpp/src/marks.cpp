#include "hostweave/marks.h"

#include "hostweave/check.h"

namespace hw {

static thread_local Marks* marks = nullptr;

Marks::Marks() { marks = this; }

Marks::~Marks() { marks = nullptr; }

cudaError_t Marks::add(cudaStream_t stream) {
  if (used_ == events_.size()) events_.emplace_back(cudaEventDefault);
  return cudaEventRecord(events_[used_++], stream);
}

std::vector<float> Marks::take(cudaEvent_t begin) {
  std::vector<float> times(used_);
  for (std::size_t i = 0; i < used_; ++i) HW_CHECK(cudaEventElapsedTime(&times[i], begin, events_[i]));
  used_ = 0;
  return times;
}

cudaError_t mark(cudaStream_t stream) { return marks ? marks->add(stream) : cudaSuccess; }

}  // namespace hw
