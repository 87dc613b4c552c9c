// The bytes that an op reads or writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hostweave::cpu {

struct Range {  // `rows` pieces of `bytes` bytes, `pitch` apart
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::size_t rows = 1;
  std::size_t pitch = 0;
  bool write = false;
  bool scratch = false;  // written, but nobody reads what is left there

  bool empty() const { return bytes == 0 || rows == 0; }
  std::uintptr_t end() const { return empty() ? begin : begin + (rows - 1) * pitch + bytes; }
};

using Ranges = std::vector<Range>;

inline Range read_of(const void* pointer, std::size_t bytes, std::size_t rows = 1, std::size_t pitch = 0) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, rows, pitch, false, false};
}
inline Range scratch_of(const void* pointer, std::size_t bytes) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, 1, 0, true, true};
}
inline Range write_of(const void* pointer, std::size_t bytes, std::size_t rows = 1, std::size_t pitch = 0) {
  return {reinterpret_cast<std::uintptr_t>(pointer), bytes, rows, pitch, true, false};
}

}  // namespace hostweave::cpu
