// GPU memory that other ranks of this host access. Threads of one process use the same address. Other processes open an IPC
// handle.
//
// If all ranks are threads of one process, the virtual memory API allocates the memory, and peer access stays disabled. With peer
// access, each cudaMalloc and cudaFree would wait for all work on all GPUs. This work may wait for a signal of the calling
// thread.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace hw {

// Description of a rank and of one of its allocations. The other ranks receive this description.
struct MemoryCard {
  char host[64];  // boot id
  int64_t process;
  int device;  // device number in the rank's process
  void* data;
  cudaIpcMemHandle_t handle;
};

// Description of the calling rank, without an allocation.
MemoryCard card_of_rank();

// Allocates memory of the current device that other ranks can map. Rounds up to whole pieces. `in_process` means that all ranks
// are threads of this process.
void* allocate_shared(size_t bytes, bool in_process);
void free_shared(void* data);
// Adds an allocation to the description of its rank.
MemoryCard with_memory(MemoryCard card, void* data);

// Maps the allocation of `peer` for the rank `own`. Returns null if the rank cannot access the allocation.
void* open_memory(const MemoryCard& own, const MemoryCard& peer);
void close_memory(const MemoryCard& own, const MemoryCard& peer, void* opened);

}  // namespace hw
