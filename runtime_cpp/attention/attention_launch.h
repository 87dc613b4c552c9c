// Attention by kernels of this package, and those that cuDNN's needs beside.
#pragma once
#include <cuda_runtime_api.h>

#include "hostweave/attention_kernel.h"

namespace hw {

// Loads the kernels, as MatmulPlan::load_kernels does, and why.
cudaError_t load_attention(const AttentionKernels& kernels);
cudaError_t attend(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);
cudaError_t differentiate(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);
cudaError_t differentiate_bias(const AttentionKernels& kernels, const AttentionKernel& problem, cudaStream_t stream);

cudaError_t load_packing();
cudaError_t place_sequences(const PackedSequences& packed, cudaStream_t stream);
cudaError_t fill_outside(const OutsideSequences& outside, cudaStream_t stream);

bool has_sums();  // they are left out where there is no nvcc
cudaError_t add_rows(const AddedRows& rows, cudaStream_t stream);

}  // namespace hw
