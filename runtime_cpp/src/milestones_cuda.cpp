// Milestones on GPUs: events.
#include <deque>
#include <mutex>
#include <vector>

#include "hostweave/check.h"
#include "hostweave/milestones.h"
#include "hostweave/streams.h"

namespace hw {

struct Milestones::All {
  mutable std::mutex mutex;
  std::deque<Event> events;
  std::vector<int> free;
};

Milestones::Milestones() = default;

Milestones::~Milestones() = default;

int Milestones::set(cudaStream_t stream, bool is_captured) {
  if (is_captured) return kNone;
  int milestone = kNone;
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(all_->mutex);
    if (all_->free.empty()) {
      all_->events.emplace_back();
      all_->free.push_back(static_cast<int>(all_->events.size()) - 1);
    }
    milestone = all_->free.back();
    all_->free.pop_back();
    event = all_->events[milestone];
  }
  HW_CHECK(cudaEventRecord(event, stream));  // without the lock: it may wait for room in the queue of the GPU
  return milestone;
}

void Milestones::give_back(int milestone) {
  if (milestone == kNone) return;
  const std::lock_guard lock(all_->mutex);
  all_->free.push_back(milestone);
}

bool Milestones::is_done(int milestone, int64_t) const {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(all_->mutex);
    event = all_->events[milestone];
  }
  return cudaEventQuery(event) == cudaSuccess;
}

}  // namespace hw
