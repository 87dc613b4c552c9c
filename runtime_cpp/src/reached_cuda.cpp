#include <cuda.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/driver_function.h"
#include "hostweave/errors.h"
#include "hostweave/reach.h"
#include "hostweave/reached.h"

namespace hw {
namespace {

template <class Function, class... Args>
void call_driver(const char* name, const Args&... args) {
  auto* const call = driver_function<Function>(name);
  const CUresult error = call ? call(args...) : CUDA_ERROR_NOT_FOUND;
  if (error) throw ExecutionError(std::string(name) + " has failed with error " + std::to_string(error) + " of the driver");
}
#define HW_DRIVER(function, ...) call_driver<decltype(function)>(#function, __VA_ARGS__)

struct Mapped {
  CUmemGenericAllocationHandle handle;
  size_t bytes;
};

std::mutex mapped_mutex;
auto& mapped() { return immortal<std::map<void*, Mapped>>(); }  // guarded by mapped_mutex

// Read and write access for the device of the memory, and for all devices that can access this device.
std::vector<CUmemAccessDesc> access_of(int device) {
  int count = 0;
  HW_CHECK(cudaGetDeviceCount(&count));
  std::vector<CUmemAccessDesc> access;
  for (int other = 0; other < count; ++other) {
    int can = other == device;
    if (!can) HW_CHECK(cudaDeviceCanAccessPeer(&can, other, device));
    CUmemAccessDesc one{};
    one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    one.location.id = other;
    one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (can) access.push_back(one);
  }
  return access;
}

void* allocate_mapped(size_t bytes) {
  int device = 0;
  HW_CHECK(cudaGetDevice(&device));
  CUmemAllocationProp what{};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  what.location.id = device;
  Mapped memory{.handle = 0, .bytes = bytes};
  CUdeviceptr begin = 0;
  HW_DRIVER(cuMemCreate, &memory.handle, bytes, &what, 0ull);
  HW_DRIVER(cuMemAddressReserve, &begin, bytes, size_t{0}, CUdeviceptr{0}, 0ull);
  HW_DRIVER(cuMemMap, begin, bytes, size_t{0}, memory.handle, 0ull);
  const std::vector<CUmemAccessDesc> access = access_of(device);
  HW_DRIVER(cuMemSetAccess, begin, bytes, access.data(), access.size());
  auto* const data = reinterpret_cast<void*>(begin);
  const std::lock_guard lock(mapped_mutex);
  mapped()[data] = memory;
  return data;
}

}  // namespace

MemoryCard card_of_rank() {
  MemoryCard card{};
  std::ifstream("/proc/sys/kernel/random/boot_id").read(card.host, sizeof card.host - 1);
  card.process = getpid();
  HW_CHECK(cudaGetDevice(&card.device));
  return card;
}

void* allocate_shared(size_t bytes, bool in_process) {
  bytes = whole_pieces(bytes);  // granularity of handles and mappings
  if (in_process) return allocate_mapped(bytes);
  void* data = nullptr;
  HW_CHECK(cudaMalloc(&data, bytes));
  return data;
}

void free_shared(void* data) {
  Mapped memory{};
  {
    const std::lock_guard lock(mapped_mutex);
    if (const auto found = mapped().find(data); found != mapped().end()) memory = mapped().extract(found).mapped();
  }
  if (!memory.bytes) {
    HW_CHECK(cudaFree(data));
    return;
  }
  const auto begin = reinterpret_cast<CUdeviceptr>(data);
  HW_DRIVER(cuMemUnmap, begin, memory.bytes);
  HW_DRIVER(cuMemAddressFree, begin, memory.bytes);
  HW_DRIVER(cuMemRelease, memory.handle);
}

MemoryCard with_memory(MemoryCard card, void* data) {
  card.data = data;
  // Mapped memory has no IPC handle, so other processes cannot open the memory.
  if (cudaIpcGetMemHandle(&card.handle, data) != cudaSuccess) cudaGetLastError();
  return card;
}

void* open_memory(const MemoryCard& own, const MemoryCard& peer) {
  if (std::memcmp(own.host, peer.host, sizeof own.host) != 0) return nullptr;
  void* opened = nullptr;
  cudaError_t error = cudaSuccess;
  if (own.process == peer.process) {
    int can = own.device == peer.device;
    if (!can) error = cudaDeviceCanAccessPeer(&can, own.device, peer.device);
    opened = can ? peer.data : nullptr;
  } else {
    error = cudaIpcOpenMemHandle(&opened, peer.handle, cudaIpcMemLazyEnablePeerAccess);
  }
  cudaGetLastError();
  return error == cudaSuccess ? opened : nullptr;
}

void close_memory(const MemoryCard& own, const MemoryCard& peer, void* opened) {
  if (opened && own.process != peer.process) HW_CHECK(cudaIpcCloseMemHandle(opened));
}

}  // namespace hw
