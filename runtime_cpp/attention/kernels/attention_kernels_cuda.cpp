// Table of the attention kernels for HW_DTYPE and heads of up to HW_HEAD elements.
#include "hostweave/attention.h"
#include "hostweave/attention_kernel.h"
#include "hostweave/launch.h"

namespace hw {

#ifdef HOSTWEAVE_WITHOUT_NVCC

const AttentionKernels HW_ATTENTION(attention){};

#else

__global__ void HW_ATTENTION(attend)(AttentionKernel);
__global__ void HW_ATTENTION(differentiate_queries)(AttentionKernel);
__global__ void HW_ATTENTION(differentiate_keys)(AttentionKernel);
__global__ void HW_ATTENTION(differentiate_bias)(AttentionKernel);

const AttentionKernels HW_ATTENTION(attention){HW_ATTENTION(attend), HW_ATTENTION(differentiate_queries),
                                               HW_ATTENTION(differentiate_keys), HW_ATTENTION(differentiate_bias)};

#endif

}  // namespace hw
