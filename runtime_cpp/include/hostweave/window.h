// The memory of a program whose ranks write to and read from each other's: an arena that is registered with its channels.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "hostweave/channel.h"
#include "hostweave/hidden.h"
#include "hostweave/memory_plan.h"

// Calls that not every NCCL has. A program compiles and loads without them, and says what is missing when it is prepared.
extern "C" {
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 27, 0)
typedef struct ncclWindow_vidmem* ncclWindow_t;
#define NCCL_WIN_COLL_SYMMETRIC 0x01
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) __attribute__((weak));
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) __attribute__((weak));
#endif
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 0)
typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;
#endif
#ifndef HOSTWEAVE_CPU_DEVICE
ncclResult_t ncclPutSignal(const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int, unsigned int, ncclComm_t,
                           cudaStream_t) __attribute__((weak));
ncclResult_t ncclSignal(int, int, int, unsigned int, ncclComm_t, cudaStream_t) __attribute__((weak));
ncclResult_t ncclWaitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) __attribute__((weak));
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t, int, void**) __attribute__((weak));
#endif
}

namespace hw {

class WindowArena {
 public:
  // The channels outlive it; of those that this rank is not in nothing is registered.
  explicit WindowArena(std::initializer_list<const Channel*> channels);

  // As of Arena: where the windows grow all ranks of the channels come together, as all reserve the same. Throws
  // ExecutionError where NCCL cannot do what the program needs.
  void reserve(MemoryPlan& plan);

  // As of CallOrder, of all programs on these channels.
  cudaError_t begin_call(cudaStream_t caller) const;
  cudaError_t end_call(cudaStream_t caller) const;

  // All of it, to `visit` with its bytes.
  template <class Visit>
  void each_memory(Visit&& visit) const {
    for (const auto& [data, bytes] : memory().parts) visit(data, bytes);
  }

  ncclWindow_t window(const Channel& channel) const;
  // Of a place in this rank's windows, in bytes. Throws ExecutionError for one elsewhere.
  size_t offset(const void* place) const;
  // The same place in the memory of a peer, which copies and kernels of this rank can use.
  template <class T>
  T* on_peer(const Channel& channel, int64_t peer, T* place) const {
    return static_cast<T*>(place_on_peer(channel, peer, place));
  }

 private:
  struct Windows;
  void* place_on_peer(const Channel& channel, int64_t peer, const void* place) const;
  struct Memory {
    struct {
      void* data;
      size_t bytes;
    } parts[2];  // in windows, and elsewhere
  };
  Memory memory() const;

  Hidden<Windows> windows_;
};

// The stream waits for the next signal of a peer under this number.
inline ncclResult_t wait_signal(int64_t peer, int number, ncclComm_t comm, cudaStream_t stream) {
  ncclWaitSignalDesc_t next{.opCnt = 1, .peer = static_cast<int>(peer), .sigIdx = number, .ctx = 0};
  return ncclWaitSignal(1, &next, comm, stream);
}

}  // namespace hw
