#include <algorithm>

#include "attention_f32_launch.h"
#include "hostweave/errors.h"
#include "hostweave/launch.h"

namespace hw {

#ifdef HOSTWEAVE_WITHOUT_NVCC

cudaError_t load_attention_f32(const AttentionF32&) {
  throw ExecutionError(
      "attention: of f32 it is a kernel, which was left out as there was no nvcc: build with nvcc, or cast the operands to bf16");
}
cudaError_t attend_f32(const AttentionF32&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t differentiate_f32(const AttentionF32&, cudaStream_t) { return cudaErrorNotSupported; }

#else

#define HW_ATTENTION(kHead)                                                                        \
  __global__ void attend_f32_##kHead(AttentionF32 p);                                              \
  __global__ void differentiate_queries_f32_##kHead(AttentionF32 p);                               \
  __global__ void differentiate_keys_f32_##kHead(AttentionF32 p);                                  \
  constexpr AttentionF32Kernels kFor##kHead{attend_f32_##kHead, differentiate_queries_f32_##kHead, \
                                            differentiate_keys_f32_##kHead};

namespace {

struct AttentionF32Kernels {
  void (*attend)(AttentionF32);
  void (*differentiate_queries)(AttentionF32);
  void (*differentiate_keys)(AttentionF32);
};

}  // namespace

HW_ATTENTION(64)
HW_ATTENTION(128)
HW_ATTENTION(256)

namespace {

const AttentionF32Kernels& kernels_for(const AttentionF32& p) {
  const int64_t head = std::max(p.size, p.value_size);
  return head <= 64 ? kFor64 : head <= 128 ? kFor128 : kFor256;
}

// A block for each tile of the rows of every head.
Grid grid_of(int64_t batch, int64_t heads, int64_t rows) {
  return {batch * heads * ceil_div(rows, kAttentionTile), kAttentionThreads};
}

}  // namespace

cudaError_t load_attention_f32(const AttentionF32& p) {
  const auto& [attend, differentiate_queries, differentiate_keys] = kernels_for(p);
  for (const auto kernel : {attend, differentiate_queries, differentiate_keys}) {
    if (const cudaError_t status = load(kernel); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t attend_f32(const AttentionF32& p, cudaStream_t stream) {
  return launch(kernels_for(p).attend, grid_of(p.batch, p.heads, p.rows), stream, p);
}

cudaError_t differentiate_f32(const AttentionF32& p, cudaStream_t stream) {
  const cudaError_t status = launch(kernels_for(p).differentiate_queries, grid_of(p.batch, p.heads, p.rows), stream, p);
  if (status != cudaSuccess) return status;
  return launch(kernels_for(p).differentiate_keys, grid_of(p.batch, p.groups, p.columns), stream, p);
}

#endif

}  // namespace hw
