// LRU cache of plans.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace hw {

// Keeps a maximum number of plans, and evicts the least recently used plan.
template <class Key, class Plan>
class PlanCache {
 public:
  explicit PlanCache(size_t most) : most_(most) {}

  // Returns the plan for a key, calling `make` if there is none. The reference stays valid until the plan is evicted.
  template <class Make>
  const Plan& find(const Key& key, const Make& make) {
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan = make();
      if (plans_.size() == most_)
        plans_.erase(std::ranges::min_element(plans_, {}, [](const auto& one) { return one.second.asked; }));
      found = plans_.emplace(key, Entry{std::move(plan)}).first;
    }
    found->second.asked = ++asked_;
    return found->second.plan;
  }

 private:
  struct Entry {
    Plan plan;
    uint64_t asked = 0;
  };
  size_t most_;
  std::map<Key, Entry> plans_;
  uint64_t asked_ = 0;
};

}  // namespace hw
