// Element types, by the names that the IR gives them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace hw {

using f16 = __half;
using bf16 = __nv_bfloat16;
using f8e4m3 = __nv_fp8_e4m3;
using f8e5m2 = __nv_fp8_e5m2;

}  // namespace hw
