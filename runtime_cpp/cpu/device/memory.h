// Device memory: who owns which bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>

namespace hostweave::cpu {

struct Allocation {
  std::size_t bytes;
  int device;
  std::size_t mapped;  // bytes of a mapping of its own, 0 when on the heap
};

class Memory {
 public:
  // Filled with 0xff bytes, which is NaN in every float type. Null when there is none left.
  void* allocate(std::size_t bytes, int device);
  void release(void* pointer);
  // The allocation that holds this address, if the device made it.
  const Allocation* find(std::uintptr_t address, std::uintptr_t* base = nullptr) const;
  const Allocation* at(const void* pointer) const;  // the one that begins here
  std::uint64_t live_bytes(int device) const;       // -1: of all devices
  std::uint64_t made() const { return made_; }      // ever

 private:
  std::map<std::uintptr_t, Allocation> allocations_;
  std::uint64_t made_ = 0;
};

}  // namespace hostweave::cpu
