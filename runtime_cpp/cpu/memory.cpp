#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "machine.h"
#include "shared.h"

namespace hostweave::cpu {
namespace {

constexpr std::size_t kPattern = std::size_t{2} << 20;
constexpr std::size_t kAlignment = 256;  // alignment of cudaMalloc

// Sanitizers do not detect overruns of mapped memory, so their builds map only shared memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kMapFrom = SIZE_MAX;
#else
constexpr std::size_t kMapFrom = kPattern;
#endif

int pattern_file() {  // in-memory file with 2 MiB of 0xff
  static const int file = [] {
    const int fd = memfd_create("hostweave_nan", MFD_CLOEXEC);
    if (fd < 0) return -1;
    const std::vector<unsigned char> bytes(kPattern, 0xff);
    return write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()) ? fd : -1;
  }();
  return file;
}

// Maps the pattern repeatedly, copy-on-write. A page uses memory only after a write to the page.
bool map_pattern(void* base, std::size_t bytes) {
  const int file = pattern_file();
  if (file < 0) return false;
  for (std::size_t at = 0; at < bytes; at += kPattern) {
    const std::size_t piece = std::min(kPattern, bytes - at);
    if (mmap(static_cast<char*>(base) + at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED) {
      return false;
    }
  }
  return true;
}

void* map_memory(std::size_t bytes) {
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  if (!map_pattern(base, bytes)) {
    // The process may have too many mappings. Use one mapping for the whole range, and fill the range.
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
      munmap(base, bytes);
      return nullptr;
    }
    std::memset(base, 0xff, bytes);
  }
  return base;
}

}  // namespace

void* Memory::allocate(std::size_t bytes, int device, bool shared) {
  Allocation allocation{0, bytes, device, 0, -1};
  void* pointer = nullptr;
  if (bytes > SIZE_MAX - kPattern) return nullptr;
  if (shared) {
    allocation.mapped = bytes;
    allocation.file = new_shared_file(bytes);
    pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation.file, 0);
    if (pointer == MAP_FAILED) {
      if (allocation.file >= 0) close(allocation.file);
      return nullptr;
    }
    std::memset(pointer, 0xff, bytes);
  } else if (bytes >= kMapFrom) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    allocation.mapped = (bytes + page - 1) / page * page;
    pointer = map_memory(allocation.mapped);
  } else {
    if (posix_memalign(&pointer, kAlignment, bytes) != 0) pointer = nullptr;
    if (pointer) std::memset(pointer, 0xff, bytes);
  }
  allocation.begin = reinterpret_cast<std::uintptr_t>(pointer);
  if (pointer) allocations_.emplace(allocation.begin, allocation);
  made_ += pointer && device != kHost;
  return pointer;
}

void Memory::release(void* pointer) {
  const auto it = allocations_.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (it == allocations_.end()) return;
  if (it->second.file >= 0) close(it->second.file);
  if (it->second.mapped) {
    munmap(pointer, it->second.mapped);
  } else {
    std::free(pointer);
  }
  allocations_.erase(it);
}

const Allocation* Memory::find(std::uintptr_t address) const {
  const auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& allocation = std::prev(next)->second;
  return address < allocation.begin + allocation.bytes ? &allocation : nullptr;
}

std::uint64_t Memory::live_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [address, allocation] : allocations_) bytes += allocation.device != kHost ? allocation.bytes : 0;
  return bytes;
}

}  // namespace hostweave::cpu
