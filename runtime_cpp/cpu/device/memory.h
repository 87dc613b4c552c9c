// Device and page-locked memory: who owns which bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "cuda_runtime_api.h"

namespace hostweave::cpu {

struct Allocation {
  std::size_t bytes;
  int device;
  cudaMemoryType type;
  std::size_t mapped;  // bytes of a mapping of its own, 0 when on the heap
};

class Memory {
 public:
  // Filled with 0xff bytes, which is NaN in every float type, if `fill`. Null when there is none left.
  void* allocate(std::size_t bytes, int device, cudaMemoryType type, bool fill);
  void release(void* pointer);
  // The allocation that holds this address, if the device made it.
  const Allocation* find(std::uintptr_t address, std::uintptr_t* base = nullptr) const;
  const Allocation* at(const void* pointer) const;  // the one that begins here
  std::uint64_t live_bytes(int device) const;       // -1: of all devices
  std::uint64_t made() const { return made_; }      // of device memory, ever

 private:
  std::map<std::uintptr_t, Allocation> allocations_;
  std::uint64_t made_ = 0;
};

}  // namespace hostweave::cpu
