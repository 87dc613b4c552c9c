// Attention kernels for HW_DTYPE and heads of up to HW_HEAD elements.
#include "hostweave/attention_kernels.h"
#include "hostweave/types.h"

namespace hw {

using f32 = float;

constexpr int kBlocks = sizeof(HW_DTYPE) == 2 && HW_HEAD <= 128 ? 2 : 1;  // blocks per multiprocessor

// HW_ATTENTION names the kernels, because nvcc does not export template instances to other files.

// Each paragraph below is compiled separately.

__global__ void __launch_bounds__(kAttentionThreads, kBlocks) HW_ATTENTION(attend)(AttentionKernel p) {
  attend<HW_DTYPE, HW_HEAD>(p, blockIdx.x);
}

__global__ void __launch_bounds__(kAttentionThreads, kBlocks) HW_ATTENTION(differentiate_queries)(AttentionKernel p) {
  differentiate_queries<HW_DTYPE, HW_HEAD>(p, blockIdx.x);
}

__global__ void __launch_bounds__(kAttentionThreads, kBlocks) HW_ATTENTION(differentiate_keys)(AttentionKernel p) {
  differentiate_keys<HW_DTYPE, HW_HEAD>(p, blockIdx.x);
}

__global__ void __launch_bounds__(kAttentionThreads, kBlocks) HW_ATTENTION(differentiate_bias)(AttentionKernel p) {
  differentiate_bias<HW_DTYPE>(p, blockIdx.x);
}

}  // namespace hw
