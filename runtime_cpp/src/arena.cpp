#include "hostweave/arena.h"

#include <utility>
#include <vector>

#include "hostweave/device_memory.h"

namespace hw {

struct Arena::Memory {
  DeviceMemory current;
  std::vector<DeviceMemory> of_graphs;  // earlier memory that graphs may use
};

Arena::Arena() = default;

Arena::Arena(CallOrder& calls) : calls_(&calls) {}

void* Arena::data() const { return memory_->current.data(); }

size_t Arena::bytes() const { return memory_->current.bytes(); }

void Arena::reserve(MemoryPlan& plan) {
  const size_t total = plan.place().elsewhere;
  if (total > bytes() && calls_->in_graphs()) memory_->of_graphs.push_back(std::exchange(memory_->current, {}));
  plan.set_pointers(memory_->current.reserve(total));
}

}  // namespace hw
