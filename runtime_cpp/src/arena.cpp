#include "hostweave/arena.h"

#include <utility>

#include "hostweave/check.h"

namespace hw {

void Arena::reserve(MemoryPlan& plan) {
  const size_t total = plan.place().elsewhere;
  if (total > memory_.bytes() && calls_.in_graphs()) of_graphs_.push_back(std::exchange(memory_, {}));
  plan.set_pointers(memory_.reserve(total));
}

}  // namespace hw
