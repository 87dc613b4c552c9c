// Memory of a GPU that other ranks of this host map: by its address if all of them are threads of one process, else by a handle.
//
// Threads map it without peer access between the devices, which would make each cudaMalloc and cudaFree of the process wait for
// the work of all GPUs, and so for the signals that this work waits for.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace hw {

// A rank's description of itself and of one allocation, for the other ranks.
struct MemoryCard {
  char host[64];  // the id of its boot
  int64_t process;
  int device;  // by its number in that process
  void* data;
  cudaIpcMemHandle_t handle;
};

// The card of the calling rank, without an allocation.
MemoryCard card_of_rank();

// Memory of the current device that other ranks can map, in whole pieces. With `in_process` all of them are threads of this
// process.
void* allocate_shared(size_t bytes, bool in_process);
void free_shared(void* data);
// Adds it to the card of its rank.
MemoryCard with_memory(MemoryCard card, void* data);

// Maps that memory of a peer for the rank of the card `own`. Returns null if the rank cannot reach it.
void* open_memory(const MemoryCard& own, const MemoryCard& peer);
void close_memory(const MemoryCard& own, const MemoryCard& peer, void* opened);

}  // namespace hw
