#include <map>
#include <mutex>

#include "hostweave/launch.h"

namespace hw {

int64_t resident_blocks(const void* function, int threads) {
  static std::mutex mutex;
  static std::map<const void*, int64_t> known;  // the query takes about as long as a launch
  const std::lock_guard lock(mutex);
  int64_t& blocks = known[function];
  int each = 1;
  if (blocks == 0 && cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, function, threads, 0) == cudaSuccess) {
    blocks = each * multiprocessors();
  }
  return blocks;
}

}  // namespace hw
