#include "hostweave/memory_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <vector>

#include "hostweave/rank.h"

namespace hw {
namespace {

// Live range [first, last) of a buffer. If a stream owns the buffer, other streams can reuse the bytes only from `visible_at` on.
struct Use {
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

  int64_t first = 0, last = kForever, visible_at = kForever;
};

struct Buffer {
  void** pointer = nullptr;
  size_t bytes = 0;
  const void* pool = nullptr;  // pool of the stream that owns the buffer; null: all streams
  int64_t stream = 0;
  bool in_window = false;   // in a window; the layout of windows must be the same on all ranks
  std::vector<Use> uses{};  // consecutive live ranges
  size_t offset = 0;        // in bytes
};

constexpr size_t kPlace = 256;  // alignment of buffers in bytes, the same as with cudaMalloc
constexpr int kMoved = 8;       // maximum attempts after the first three; each changes the best order

size_t padded(size_t bytes) { return (bytes + kPlace - 1) / kPlace * kPlace; }

bool may_share(const Buffer& a, const Buffer& b) {
  const bool same_stream = a.pool == b.pool && a.stream == b.stream;
  const auto is_over = [&](const Buffer& buffer, const Use& earlier, const Use& later) {
    return earlier.last <= later.first && (!buffer.pool || same_stream || earlier.visible_at <= later.first);
  };
  return std::ranges::all_of(a.uses, [&](const Use& one) {
    return std::ranges::all_of(
        b.uses, [&](const Use& other) { return one.first <= other.first ? is_over(a, one, other) : is_over(b, other, one); });
  });
}

// Returns a lower bound for the bytes of any placement: the largest number of bytes that are live at one moment.
size_t lower_bound(std::span<const Buffer> buffers) {
  std::map<int64_t, size_t> moments;  // moment -> live bytes
  for (const Buffer& buffer : buffers) {
    for (const Use& use : buffer.uses) moments[use.first] = 0;
  }
  for (const Buffer& buffer : buffers) {
    for (const Use& use : buffer.uses) {
      for (auto at = moments.find(use.first); at != moments.end() && at->first < use.last; ++at)
        at->second += padded(buffer.bytes);
    }
  }
  size_t most = 0;
  for (const auto& [moment, bytes] : moments) most = std::max(most, bytes);
  return most;
}

// Places buffers in the given order, each in the smallest sufficient gap or at the end. For the order by size, this algorithm is
// "greedy by size" (Pisarchyk and Lee, Efficient memory management for deep neural net inference, 2020).
size_t place_in(const std::vector<size_t>& order, std::span<const Buffer> buffers, std::span<size_t> offsets) {
  size_t total = 0;
  std::vector<size_t> placed, around;
  for (const size_t i : order) {
    const size_t bytes = padded(buffers[i].bytes);
    around.clear();
    for (const size_t other : placed) {
      if (!may_share(buffers[i], buffers[other])) around.push_back(other);
    }
    std::sort(around.begin(), around.end(), [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
    size_t end = 0, best = 0, smallest = SIZE_MAX;
    for (const size_t other : around) {
      if (offsets[other] >= end + bytes && offsets[other] - end < smallest) {
        best = end;
        smallest = offsets[other] - end;
      }
      end = std::max(end, offsets[other] + padded(buffers[other].bytes));
    }
    offsets[i] = smallest == SIZE_MAX ? end : best;
    total = std::max(total, offsets[i] + bytes);
    placed.push_back(i);
  }
  return total;
}

// Renumbers the moments of these buffers as 0, 1, 2, ... Then moments of other buffers do not change the placement.
void number_moments(std::span<Buffer> buffers) {
  std::map<int64_t, int64_t> numbers;
  const auto for_each = [&](const auto& visit) {
    for (Buffer& buffer : buffers) {
      for (Use& use : buffer.uses) {
        for (int64_t* moment : {&use.first, &use.last, &use.visible_at}) {
          if (*moment != Use::kForever) visit(*moment);
        }
      }
    }
  };
  for_each([&](int64_t moment) { numbers[moment] = 0; });
  int64_t next = 0;
  for (auto& [moment, number] : numbers) number = next++;
  for_each([&](int64_t& moment) { moment = numbers[moment]; });
}

// Computes offsets (multiples of kPlace) so that buffers overlap only if they may share bytes. Returns the total bytes. Adds the
// lower bound to `all_bounds`.
size_t place(std::span<const Buffer> buffers, std::span<size_t> offsets, size_t& all_bounds) {
  std::vector<size_t> in_order(buffers.size());
  std::iota(in_order.begin(), in_order.end(), size_t{0});
  std::vector<size_t> by_size = in_order, by_area = in_order;
  int64_t end = 0;
  for (const Buffer& buffer : buffers) end = std::max(end, buffer.uses.back().first + 1);
  const auto size = [&](size_t i) { return buffers[i].bytes; };
  const auto area = [&](size_t i) {
    double area = 0;
    for (const Use& use : buffers[i].uses) {
      area += static_cast<double>(buffers[i].bytes) * static_cast<double>(std::min(use.last, end) - use.first);
    }
    return area;
  };
  std::ranges::stable_sort(by_size, std::greater(), size);
  std::ranges::stable_sort(by_area, std::greater(), area);

  const size_t bound = lower_bound(buffers);
  all_bounds += bound;
  size_t least = SIZE_MAX;
  std::vector<size_t> tried(buffers.size());
  const auto end_of = [&](size_t i) { return tried[i] + padded(buffers[i].bytes); };
  std::vector<size_t>* best = nullptr;
  const auto attempt = [&](std::vector<size_t>& order) {
    const size_t total = place_in(order, buffers, tried);
    if (total < least) {
      least = total;
      best = &order;
      std::ranges::copy(tried, offsets.begin());
    }
    const auto highest = std::ranges::max_element(order, {}, end_of);  // The next attempt in this order places this buffer first.
    if (highest != order.end()) std::rotate(order.begin(), highest, highest + 1);
  };
  for (auto* order : {&by_size, &by_area, &in_order}) {
    if (least > bound) attempt(*order);
  }
  for (int moved = 0; moved < kMoved && least > bound; ++moved) attempt(*best);
  return least;
}

}  // namespace

struct MemoryPlan::Buffers {
  int64_t now = 0;
  std::vector<Buffer> all;  // in order of their first allocation
  size_t bound = 0;         // lower bound in bytes
};

MemoryPlan::MemoryPlan() = default;

void MemoryPlan::allocate(void** pointers, size_t pointer_count, size_t bytes, const void* pool, bool in_window) {
  std::vector<Buffer>& all = buffers_->all;
  for (size_t stream = 0; stream < pointer_count; ++stream) {
    auto found = std::ranges::find(all, &pointers[stream], &Buffer::pointer);
    if (found == all.end()) found = all.insert(found, {&pointers[stream], bytes, pool, static_cast<int64_t>(stream), in_window});
    found->uses.push_back({.first = buffers_->now});
  }
  ++buffers_->now;
}

void MemoryPlan::join(const void* pool) {
  const int64_t now = buffers_->now++;
  for (Buffer& buffer : buffers_->all) {
    if (buffer.pool != pool) continue;
    for (Use& use : buffer.uses) {
      use.last = std::min(use.last, now);
      use.visible_at = std::min(use.visible_at, now);
    }
  }
}

void MemoryPlan::free(const void* first_pointer, const void* last_pointer) {
  const int64_t now = buffers_->now++;
  for (Buffer& buffer : buffers_->all) {
    const void* const pointer = buffer.pointer;
    if (std::less()(pointer, first_pointer) || !std::less()(pointer, last_pointer)) continue;
    for (Use& use : buffer.uses) use.last = std::min(use.last, now);
  }
}

MemoryPlan::Bytes MemoryPlan::place() {
  buffers_->bound = 0;
  const auto place_those = [&](bool in_window) {
    std::vector<Buffer> chosen;
    for (const Buffer& buffer : buffers_->all) {
      if (buffer.in_window == in_window) chosen.push_back(buffer);
    }
    number_moments(chosen);
    std::vector<size_t> offsets(chosen.size());
    const size_t bytes = hw::place(chosen, offsets, buffers_->bound);
    auto offset = offsets.begin();
    for (Buffer& buffer : buffers_->all) {
      if (buffer.in_window == in_window) buffer.offset = *offset++;
    }
    return bytes;
  };
  const size_t in_windows = place_those(true);
  return {.in_windows = in_windows, .elsewhere = place_those(false)};
}

void MemoryPlan::set_pointers(void* memory, void* windows) const {
  for (const Buffer& buffer : buffers_->all)
    *buffer.pointer = static_cast<char*>(buffer.in_window ? windows : memory) + buffer.offset;
}

}  // namespace hw

// Plans memory for Python. An event has five numbers: kind, first buffer, number of buffers, bytes per buffer, and pool of
// streams. Kinds are 0 allocate, 1 free, 2 join, and 3 allocate in a window. Bytes are -1 for the cuBLASLt workspace. Pool 0
// means no pool. Buffers are numbered in the order of their first allocation. Writes the offset and bytes of each buffer, and
// the lower bound. Returns the total bytes.
extern "C" uint64_t hw_plan_memory(int64_t event_count, const int64_t (*events)[5], int64_t buffer_count, uint64_t* offsets,
                                   uint64_t* bytes, uint64_t* bound) {
  hw::MemoryPlan plan;
  std::vector<void*> pointers(buffer_count);
  for (const auto& [kind, first, count, size, pool_number] : std::span(events, event_count)) {
    const auto* const pool = reinterpret_cast<const void*>(pool_number);
    if (kind == 0 || kind == 3) {
      plan.allocate(&pointers[first], count, size < 0 ? hw::kWorkspaceBytes : size, pool, kind == 3);
    } else if (kind == 1) {
      plan.free(&pointers[first], &pointers[first] + count);
    } else {
      plan.join(pool);
    }
  }
  const hw::MemoryPlan::Bytes total = plan.place();  // Other memory follows the memory of all windows.
  for (const hw::Buffer& buffer : plan.buffers().all) {
    *offsets++ = buffer.offset + (buffer.in_window ? 0 : total.in_windows);
    *bytes++ = buffer.bytes;
  }
  *bound = plan.buffers().bound;
  return total.in_windows + total.elsewhere;
}
