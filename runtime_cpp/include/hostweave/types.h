// Element types, under their IR names.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "hostweave/f8.h"

namespace hw {

using f16 = __half;
using bf16 = __nv_bfloat16;

}  // namespace hw
