// How the CPU device runs ranks and their streams.
#pragma once
#include <cstdint>

namespace hw {

// The CUDA target has no choice, so of all this it takes the time alone.
struct Schedule {
  bool seeded = false;  // one thing at a time, chosen by the seed, instead of everything at once
  uint64_t seed = 0;    // this and the rest as in hw_cpu_config
  int picker = 0;
  int ordered_launches = -1;
  int buffered_sends = -1;
  int check_dependencies = -1;
  double timeout_seconds = 120;  // without progress, after which a call is given up

  bool operator==(const Schedule&) const = default;
};

}  // namespace hw
