// Prints the values of enum_values.inc, and a digest of the narrow float conversions, for the included headers.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

template <class T>
unsigned short bits_of(T value) {
  unsigned short bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

int main() {
#define CHECK(name) std::printf("%s %lld\n", #name, (long long)(name));
#include "enum_values.inc"
  std::uint64_t bf16 = 0, f16 = 0, back = 0;
  for (std::uint64_t i = 0; i < (1ull << 32); i += 997) {  // This step visits every exponent and rounding case.
    const auto pattern = static_cast<std::uint32_t>(i);
    float value;
    std::memcpy(&value, &pattern, sizeof value);
    bf16 = bf16 * 1099511628211ull + bits_of(__float2bfloat16(value));
    f16 = f16 * 1099511628211ull + bits_of(__float2half(value));
  }
  for (unsigned i = 0; i < 65536; ++i) {
    const auto pattern = static_cast<unsigned short>(i);
    __half half;
    __nv_bfloat16 bfloat;
    std::memcpy(&half, &pattern, 2);
    std::memcpy(&bfloat, &pattern, 2);
    for (const float value : {__half2float(half), __bfloat162float(bfloat)}) {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      if (value != value) bits = 1;  // The payload of a NaN depends on the machine.
      back = back * 1099511628211ull + bits;
    }
  }
  std::printf("bf16 %llx f16 %llx back %llx\n", (unsigned long long)bf16, (unsigned long long)f16, (unsigned long long)back);
}
