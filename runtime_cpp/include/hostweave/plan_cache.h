// Plans by what they are for.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace hw {

// So many of them at most: the one that was asked for longest ago makes place for a new one.
template <class Key, class Plan>
class PlanCache {
 public:
  explicit PlanCache(size_t most) : most_(most) {}

  // The plan for this, as `make` makes it where there is none. It stays until as many others have been asked for.
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
