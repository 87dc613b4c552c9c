// Milestones in graphs.
#include "hostweave/kernel.h"

namespace hw {

// Increments a word, and copies it to host memory. Only this kernel writes the word, once in each launch of a graph.
__global__ void count_up(uint64_t* count, uint64_t* shown) { *static_cast<volatile uint64_t*>(shown) = ++*count; }

}  // namespace hw
