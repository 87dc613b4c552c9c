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

void* Arena::part(size_t number, size_t* bytes) const {
  *bytes = memory_->current.bytes();
  return number == 0 && *bytes != 0 ? memory_->current.data() : nullptr;
}

void Arena::reserve(MemoryPlan& plan) {
  const size_t total = plan.place().elsewhere;
  if (total > memory_->current.bytes() && calls_->in_graphs()) memory_->of_graphs.push_back(std::exchange(memory_->current, {}));
  plan.set_pointers(memory_->current.reserve(total));
}

}  // namespace hw
