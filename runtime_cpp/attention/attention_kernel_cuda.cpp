#include <algorithm>

#include "attention_kernel_launch.h"
#include "hostweave/errors.h"
#include "hostweave/launch.h"

namespace hw {

#ifdef HOSTWEAVE_WITHOUT_NVCC

cudaError_t load_attention(cudaDataType_t, const AttentionKernel&) {
  throw ExecutionError(
      "attention: of f32, of packed sequences, and of a bias beside a mask at the bottom right it is a kernel, which was left "
      "out "
      "as there was no nvcc: build with nvcc");
}
cudaError_t attend(cudaDataType_t, const AttentionKernel&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t differentiate(cudaDataType_t, const AttentionKernel&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t load_packing() { return load_attention(CUDA_R_32F, {}); }
cudaError_t place_sequences(const PackedSequences&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t fill_outside(const OutsideSequences&, cudaStream_t) { return cudaErrorNotSupported; }

#else

#define HW_ATTENTION(kName, kHead)                                                                                     \
  __global__ void attend_##kName##_##kHead(AttentionKernel p);                                                         \
  __global__ void differentiate_queries_##kName##_##kHead(AttentionKernel p);                                          \
  __global__ void differentiate_keys_##kName##_##kHead(AttentionKernel p);                                             \
  constexpr AttentionKernels kFor_##kName##_##kHead{attend_##kName##_##kHead, differentiate_queries_##kName##_##kHead, \
                                                    differentiate_keys_##kName##_##kHead};
#define HW_ATTENTIONS(kName) HW_ATTENTION(kName, 64) HW_ATTENTION(kName, 128) HW_ATTENTION(kName, 256)

namespace {

struct AttentionKernels {
  void (*attend)(AttentionKernel);
  void (*differentiate_queries)(AttentionKernel);
  void (*differentiate_keys)(AttentionKernel);
};

}  // namespace

__global__ void place_sequences_of(PackedSequences p);
__global__ void fill_outside_of(OutsideSequences p);

HW_ATTENTIONS(f32)
HW_ATTENTIONS(f16)
HW_ATTENTIONS(bf16)

namespace {

const AttentionKernels& kernels_for(cudaDataType_t dtype, const AttentionKernel& p) {
  const int64_t head = std::max(p.size, p.value_size);
  const int size = head <= 64 ? 0 : head <= 128 ? 1 : 2;
  static constexpr AttentionKernels kF32[]{kFor_f32_64, kFor_f32_128, kFor_f32_256};
  static constexpr AttentionKernels kF16[]{kFor_f16_64, kFor_f16_128, kFor_f16_256};
  static constexpr AttentionKernels kBF16[]{kFor_bf16_64, kFor_bf16_128, kFor_bf16_256};
  return (dtype == CUDA_R_32F ? kF32 : dtype == CUDA_R_16F ? kF16 : kBF16)[size];
}

// A block for each tile of the rows of every head.
Grid grid_of(int64_t batch, int64_t heads, int64_t rows) {
  return {batch * heads * ceil_div(rows, kAttentionTile), kAttentionThreads};
}

}  // namespace

cudaError_t load_attention(cudaDataType_t dtype, const AttentionKernel& p) {
  const auto& [attend, differentiate_queries, differentiate_keys] = kernels_for(dtype, p);
  for (const auto kernel : {attend, differentiate_queries, differentiate_keys}) {
    if (const cudaError_t status = load(kernel); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t attend(cudaDataType_t dtype, const AttentionKernel& p, cudaStream_t stream) {
  return launch(kernels_for(dtype, p).attend, grid_of(p.batch, p.heads, p.rows), stream, p);
}

cudaError_t differentiate(cudaDataType_t dtype, const AttentionKernel& p, cudaStream_t stream) {
  const AttentionKernels& kernels = kernels_for(dtype, p);
  const cudaError_t status = launch(kernels.differentiate_queries, grid_of(p.batch, p.heads, p.rows), stream, p);
  if (status != cudaSuccess) return status;
  return launch(kernels.differentiate_keys, grid_of(p.batch, p.groups, p.columns), stream, p);
}

cudaError_t load_packing() {
  const cudaError_t status = load(place_sequences_of);
  return status == cudaSuccess ? load(fill_outside_of) : status;
}

cudaError_t place_sequences(const PackedSequences& p, cudaStream_t stream) {
  return launch(place_sequences_of, {ceil_div(p.batch * p.sequences + 1, kAttentionThreads), kAttentionThreads}, stream, p);
}

cudaError_t fill_outside(const OutsideSequences& p, cudaStream_t stream) {
  return launch(fill_outside_of, {ceil_div(p.batch * p.heads * p.tokens, kAttentionThreads), kAttentionThreads}, stream, p);
}

#endif

}  // namespace hw
