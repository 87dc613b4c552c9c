#include "picker.h"

#include <algorithm>
#include <array>

#include "hostweave_cpu.h"

namespace hostweave::cpu {
namespace {

std::uint64_t mix(std::uint64_t x) {  // SplitMix64, so that adjacent seeds give different schedules
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

int choose(int kind, std::uint64_t seed) {
  if (kind != HW_CPU_MIXED) return kind;
  if (seed % 4 != 3) return HW_CPU_PCT;
  return seed / 4 % 2 ? HW_CPU_HOSTS : HW_CPU_UNIFORM;
}

}  // namespace

Picker::Picker(std::uint64_t seed, int kind) : random_(mix(seed)), mixed_(mix(~seed)), kind_(choose(kind, seed)) {
  // The best rate of priority changes depends on the number of steps, which is unknown. Each seed uses one of four rates.
  constexpr std::array<std::uint64_t, 4> rates = {0, 256, 64, 16};
  change_every_ = rates[draw(rates.size())];
}

std::size_t Picker::highest(const std::vector<Candidate>& candidates, bool streams_only) {
  std::size_t best = candidates.size();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (streams_only && candidates[i].host) continue;
    if (*candidates[i].priority == 0) *candidates[i].priority = (1ull << 32) + (random_() >> 16);
    if (best == candidates.size() || *candidates[i].priority > *candidates[best].priority) best = i;
  }
  if (change_every_ != 0 && draw(change_every_) == 0) demote(*candidates[best].priority);
  return best;
}

std::size_t Picker::pick(const std::vector<Candidate>& candidates) {
  std::size_t choice = 0;
  if (kind_ == HW_CPU_UNIFORM) {
    choice = draw(candidates.size());
  } else if (kind_ == HW_CPU_PCT) {
    choice = highest(candidates, false);
  } else {
    std::vector<std::size_t> hosts;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      // Demoted hosts are excluded, because they poll for the work of other candidates.
      if (candidates[i].host && (*candidates[i].priority == 0 || *candidates[i].priority >= (1ull << 32))) hosts.push_back(i);
    }
    const bool any_stream = std::ranges::any_of(candidates, &Candidate::stream);
    choice = !hosts.empty() ? hosts[draw(hosts.size())] : highest(candidates, any_stream);
  }
  ++steps_;
  const Candidate& chosen = candidates[choice];
  for (const std::uint64_t value :
       {std::uint64_t(chosen.host != nullptr), std::uint64_t(chosen.device), std::uint64_t(chosen.number)}) {
    hash_ = (hash_ ^ value) * 1099511628211ull;
  }
  return choice;
}

}  // namespace hostweave::cpu
