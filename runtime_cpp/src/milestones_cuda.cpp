// Milestones on GPUs are events. In graphs, milestones are words in memory that kernels increment.
#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "hostweave/check.h"
#include "hostweave/device_memory.h"
#include "hostweave/launch.h"
#include "hostweave/milestones.h"
#include "hostweave/streams.h"

namespace hw {

#ifdef HOSTWEAVE_WITHOUT_NVCC  // Exported programs have no milestones in graphs, so the kernel is never loaded.
void count_up(uint64_t*, uint64_t*) {}
#else
__global__ void count_up(uint64_t* count, uint64_t* shown);
#endif

namespace {

constexpr int kWords = 1 << 16;      // maximum milestones in the graphs of a program on a rank
constexpr int kFirstWord = 1 << 30;  // milestones from this number on are words; smaller numbers are events

// Counts in GPU memory, and copies of the counts in host memory. The host can read the copies while the GPU hangs.
struct Words {
  Words() {
    HW_CHECK(load(count_up));
    counts = static_cast<uint64_t*>(memory.reserve(kWords * sizeof *counts));
    HW_CHECK(cudaMemset(counts, 0, kWords * sizeof *counts));
    HW_CHECK(cudaMallocHost(reinterpret_cast<void**>(&shown), kWords * sizeof *shown));
    std::fill_n(shown, kWords, 0);
  }
  ~Words() { cudaFreeHost(shown); }
  Words(const Words&) = delete;

  uint64_t count(int word) const { return std::atomic_ref(shown[word]).load(); }

  DeviceMemory memory;  // freed also if the constructor throws
  uint64_t *counts = nullptr, *shown = nullptr;
  std::vector<uint64_t> before = std::vector<uint64_t>(kWords);  // counts when the milestones were set
  std::vector<int> free;
  int used = 0;
};

}  // namespace

struct Milestones::All {
  mutable std::mutex mutex;
  std::deque<Event> events;
  std::vector<int> free;
  std::optional<Words> words;

  int take_word() {
    const std::lock_guard lock(mutex);
    if (!words || (words->free.empty() && words->used == kWords)) return kNone;
    if (words->free.empty()) words->free.push_back(words->used++);
    const int word = words->free.back();
    words->free.pop_back();
    words->before[word] = words->count(word);
    return word;
  }
};

Milestones::Milestones() = default;

bool Milestones::prepare_capture(bool wanted) {
  const std::lock_guard lock(all_->mutex);
  if (wanted && !all_->words) all_->words.emplace();
  return wanted;
}

int Milestones::set(cudaStream_t stream, bool is_captured) {
  if (is_captured) {
    const int word = all_->take_word();
    if (word == kNone) return kNone;
    HW_CHECK(launch(count_up, {1, 1}, stream, all_->words->counts + word, all_->words->shown + word));
    return kFirstWord + word;
  }
  std::unique_lock lock(all_->mutex);
  if (all_->free.empty()) {
    all_->events.emplace_back();
    all_->free.push_back(static_cast<int>(all_->events.size()) - 1);
  }
  const int milestone = all_->free.back();
  all_->free.pop_back();
  const cudaEvent_t event = all_->events[milestone];
  lock.unlock();  // The next call may wait for room in the queue of the GPU.
  HW_CHECK(cudaEventRecord(event, stream));
  return milestone;
}

void Milestones::give_back(int milestone) {
  if (milestone == kNone) return;
  const std::lock_guard lock(all_->mutex);
  if (milestone >= kFirstWord)
    all_->words->free.push_back(milestone - kFirstWord);
  else
    all_->free.push_back(milestone);
}

bool Milestones::is_done(int milestone, int64_t times) const {
  std::unique_lock lock(all_->mutex);
  if (const int word = milestone - kFirstWord; word >= 0)
    return all_->words->count(word) - all_->words->before[word] >= static_cast<uint64_t>(times);
  const cudaEvent_t event = all_->events[milestone];
  lock.unlock();
  return cudaEventQuery(event) == cudaSuccess;
}

}  // namespace hw
