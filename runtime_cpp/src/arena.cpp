#include "hostweave/arena.h"

#include "hostweave/check.h"

namespace hw {

Arena::~Arena() { cudaFree(data_); }

void Arena::reserve(MemoryPlan& plan) {
  const size_t total = plan.place();
  if (total > bytes_) {
    HW_CHECK(cudaFree(data_));  // waits for the calls in flight
    data_ = nullptr;
    bytes_ = 0;
    HW_CHECK(cudaMalloc(&data_, total));
    bytes_ = total;
  }
  plan.set_pointers(data_);
}

}  // namespace hw
