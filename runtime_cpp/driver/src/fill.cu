// Memset as a kernel.
#include "hostweave/kernel.h"

namespace hw {

// Repeats a pattern of four bytes.
__global__ void fill_bytes(unsigned char* to, int64_t bytes, uint32_t value) {
  const int64_t wide = aligned(to) ? bytes / 16 : 0;
  for (const int64_t i : over_grid(wide)) reinterpret_cast<Values<uint32_t, 4>*>(to)[i] = filled<4>(value);
  for (const int64_t i : over_grid(bytes - 16 * wide)) to[16 * wide + i] = value >> 8 * (i % 4);
}

}  // namespace hw
