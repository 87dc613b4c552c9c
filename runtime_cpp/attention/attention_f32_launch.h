// Attention of f32, by kernels of attention_f32.cu.
#pragma once
#include <cuda_runtime_api.h>

#include "hostweave/attention_f32.h"

namespace hw {

// Loads the kernels, as MatmulPlan::load_kernels does, and why.
cudaError_t load_attention_f32(const AttentionF32& problem);
cudaError_t attend_f32(const AttentionF32& problem, cudaStream_t stream);
cudaError_t differentiate_f32(const AttentionF32& problem, cudaStream_t stream);

}  // namespace hw
