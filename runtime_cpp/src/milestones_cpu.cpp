// Milestones on the CPU device: words that the device increments.
#include <hostweave_cpu.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "hostweave/check.h"
#include "hostweave/milestones.h"

namespace hw {

struct Milestones::All {
  mutable std::mutex mutex;
  std::deque<uint64_t> words;
  std::vector<int> free;
};

Milestones::Milestones() = default;

bool Milestones::prepare_capture(bool) { return true; }

int Milestones::set(cudaStream_t stream, bool) {
  std::unique_lock lock(all_->mutex);
  if (all_->free.empty()) {
    all_->words.emplace_back();
    all_->free.push_back(static_cast<int>(all_->words.size()) - 1);
  }
  const int milestone = all_->free.back();
  all_->free.pop_back();
  uint64_t& word = all_->words[milestone] = 0;
  lock.unlock();
  HW_CHECK(hw_cpu_milestone(stream, &word));
  return milestone;
}

void Milestones::give_back(int milestone) {
  if (milestone == kNone) return;
  const std::lock_guard lock(all_->mutex);
  all_->free.push_back(milestone);
}

bool Milestones::is_done(int milestone, int64_t times) const {
  const std::lock_guard lock(all_->mutex);
  return std::atomic_ref(all_->words[milestone]).load() >= static_cast<uint64_t>(times);
}

}  // namespace hw
