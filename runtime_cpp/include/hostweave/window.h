// The memory of a program whose ranks write to and read from each other's: an arena that is registered with its channels.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/device_memory.h"
#include "hostweave/memory_plan.h"
#include "hostweave/streams.h"

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

// What all programs of a rank that use a channel's windows share.
struct WindowUsers {
  CallOrder calls;       // signals are counted by channel, so that calls follow one another
  bool aborted = false;  // the communicator is gone, and its windows with it
};

constexpr size_t kPiece = size_t{2} << 20;  // bytes, of memory that GPUs map for each other
constexpr size_t whole_pieces(size_t bytes) { return (bytes + kPiece - 1) / kPiece * kPiece; }

// Memory, as it is registered with a channel.
struct Registered {
  ncclWindow_t window = nullptr;
  std::vector<char*> peers;  // where that of each rank begins, seen from this one
};

// Registers memory of ncclMemAlloc, as all ranks of the channel do at the same time. Throws ExecutionError where NCCL does not,
// or where a peer is out of reach.
void register_window(const Channel& channel, void* data, size_t bytes, Registered& made);
// Throws ExecutionError where the NCCL that is loaded has no one-sided calls.
void expect_one_sided_calls();

class WindowArena {
 public:
  // The channels outlive it; of those that this rank is not in nothing is registered.
  explicit WindowArena(std::initializer_list<const Channel*> channels);
  ~WindowArena();
  WindowArena(const WindowArena&) = delete;
  WindowArena& operator=(const WindowArena&) = delete;

  // As of Arena: where the windows grow all ranks of the channels come together, as all reserve the same. Throws
  // ExecutionError where NCCL cannot do what the program needs.
  void reserve(MemoryPlan& plan);

  // As of CallOrder, of all programs on these channels.
  cudaError_t begin_call(cudaStream_t caller) const;
  cudaError_t end_call(cudaStream_t caller) const;

  // All of it, to `visit` with its bytes.
  template <class Visit>
  void each_memory(Visit&& visit) const {
    visit(memory_.data, memory_.bytes);
    visit(rest_.data(), rest_.bytes());
  }

  ncclWindow_t window(const Channel& channel) const { return registered(channel).window; }
  // Of a place in this rank's windows, in bytes. Throws ExecutionError for one elsewhere.
  size_t offset(const void* place) const;
  // The same place in the memory of a peer, which copies and kernels of this rank can use.
  template <class T>
  T* on_peer(const Channel& channel, int64_t peer, T* place) const {
    return reinterpret_cast<T*>(place_on_peer(channel, peer, reinterpret_cast<const char*>(place)));
  }

 private:
  struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    std::vector<Registered> registered;  // by channel
  };

  const Registered& registered(const Channel& channel) const;
  // In the arena's own windows, or in memory that the application's ranks share.
  char* place_on_peer(const Channel& channel, int64_t peer, const char* place) const;
  void release(Memory memory) const;
  // Whether peers may be gone for which a stream waits for ever, so that nothing that it uses can be freed.
  bool is_aborted() const;

  std::vector<const Channel*> channels_;
  std::vector<std::shared_ptr<WindowUsers>> users_;  // of the channels that this rank is in
  Memory memory_;
  DeviceMemory rest_;              // what peers do not reach
  std::vector<Memory> of_graphs_;  // memory that was outgrown
  std::vector<DeviceMemory> rest_of_graphs_;
};

// The stream waits for the next signal of a peer under this number.
inline ncclResult_t wait_signal(int64_t peer, int number, ncclComm_t comm, cudaStream_t stream) {
  ncclWaitSignalDesc_t next{.opCnt = 1, .peer = static_cast<int>(peer), .sigIdx = number, .ctx = 0};
  return ncclWaitSignal(1, &next, comm, stream);
}

// Why the ranks of a channel cannot write to each other's memory, by what NCCL knows of its communicator; "" where they can, or
// where that shows when windows are registered.
std::string why_out_of_reach(const Channel& channel);

// Aborts communicators, whose windows nobody may touch afterwards, and for which no kernel waits any longer.
void abort_with_windows(const std::vector<ncclComm_t>& comms);

}  // namespace hw
