// Launches of attention kernels, and of helper kernels for cuDNN's attention.
#pragma once
#include <cuda_runtime_api.h>

#include "hostweave/attention_kernel.h"

namespace hw {

// Loads the kernels; see MatmulPlan::load_kernels.
cudaError_t load_attention(const AttentionKernels& kernels);
cudaError_t attend(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);
cudaError_t differentiate(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);
cudaError_t differentiate_bias(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);

cudaError_t load_packing();
cudaError_t place_sequences(const PackedSequences& packed, cudaStream_t stream);
cudaError_t fill_outside(const OutsideSequences& outside, cudaStream_t stream);

bool has_sums();  // false if add_rows was not compiled, because nvcc was missing
cudaError_t add_rows(const AddedRows& rows, cudaStream_t stream);

}  // namespace hw
