// Attention by kernels of attention_kernel.cu, of f32, f16 or bf16.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>

#include "hostweave/attention_kernel.h"

namespace hw {

// Loads the kernels, as MatmulPlan::load_kernels does, and why.
cudaError_t load_attention(cudaDataType_t dtype, const AttentionKernel& problem);
cudaError_t attend(cudaDataType_t dtype, const AttentionKernel& problem, cudaStream_t stream);
cudaError_t differentiate(cudaDataType_t dtype, const AttentionKernel& problem, cudaStream_t stream);

cudaError_t load_packing();
cudaError_t place_sequences(const PackedSequences& packed, cudaStream_t stream);
cudaError_t fill_outside(const OutsideSequences& outside, cudaStream_t stream);

}  // namespace hw
