// Milestones in graphs.
#include "hostweave/kernel.h"

namespace hw {

// Counts up a word, and shows the count to the host. Only this kernel writes the word, once in each launch of a graph.
__global__ void count_up(uint64_t* count, uint64_t* shown) { *static_cast<volatile uint64_t*>(shown) = ++*count; }

}  // namespace hw
