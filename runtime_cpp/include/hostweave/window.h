// Arena of a program with one-sided transfers. A window is memory that is registered with a channel, and that peers access.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "hostweave/channel.h"
#include "hostweave/hidden.h"
#include "hostweave/memory_plan.h"

// Calls that older NCCL versions lack. A program compiles and loads without these calls. `prepare` throws an error if the program
// needs a missing call.
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
  // The channels must outlive the arena. The arena ignores channels of process groups without this rank.
  explicit WindowArena(std::initializer_list<const Channel*> channels);

  // Like Arena::reserve. Growth of the windows is collective: all ranks of the channels reserve the same number of bytes. Throws
  // ExecutionError if peers cannot access the memory, if NCCL lacks a feature that the program needs, or if the channels use
  // different transports.
  void reserve(MemoryPlan& plan);

  // See CallOrder. Orders the calls of all programs of this rank that have windows of these channels.
  cudaError_t begin_call(cudaStream_t caller) const;
  cudaError_t end_call(cudaStream_t caller) const;

  // See Arena::part. The parts are the memory in windows, and other memory.
  void* part(size_t number, size_t* bytes) const;

  ncclWindow_t window(const Channel& channel) const;
  // Offset of an address in this rank's windows, in bytes. Throws ExecutionError if the address is elsewhere.
  size_t offset(const void* address) const;
  // Address in a peer's memory that corresponds to `address`, for copies and kernels of this rank.
  template <class T>
  T* on_peer(const Channel& channel, int64_t peer, T* address) const {
    return static_cast<T*>(address_on_peer(channel, peer, address));
  }

 private:
  struct Windows;
  void* address_on_peer(const Channel& channel, int64_t peer, const void* address) const;
  Hidden<Windows> windows_;
};

// Enqueues a wait for a peer's next signal of this number.
inline ncclResult_t wait_signal(int64_t peer, int number, const Communicator& comm, cudaStream_t stream) {
  if (CallLog* const log = CallLog::current()) log->awaits_signal(comm.channel(), peer, number, stream);
  ncclWaitSignalDesc_t next{.opCnt = 1, .peer = static_cast<int>(peer), .sigIdx = number, .ctx = 0};
  return ncclWaitSignal(1, &next, comm.channel().handle(), stream);
}

// Overloads of NCCL's functions for a Communicator. These functions log no channel, because they do not wait for other ranks.
inline ncclResult_t ncclPutSignal(const void* from, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
                                  size_t offset, int number, int context, unsigned flags, const Communicator& comm,
                                  cudaStream_t stream) {
  return ::ncclPutSignal(from, count, type, peer, window, offset, number, context, flags, comm.channel().handle(), stream);
}
inline ncclResult_t ncclSignal(int peer, int number, int context, unsigned flags, const Communicator& comm, cudaStream_t stream) {
  return ::ncclSignal(peer, number, context, flags, comm.channel().handle(), stream);
}

}  // namespace hw
