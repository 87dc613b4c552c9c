// Element types of 8 bits: a header of its own, because it takes a compiler longer than those of 16.
#pragma once
#include <cuda_fp8.h>

namespace hw {

using f8e4m3 = __nv_fp8_e4m3;
using f8e5m2 = __nv_fp8_e5m2;

}  // namespace hw
