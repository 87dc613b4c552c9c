#include "attention_launch.h"
#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/launch.h"

namespace hw {
namespace {

[[noreturn]] void fail_without_nvcc() {
  throw ExecutionError("attention: the kernel for these operands was not built, because nvcc was missing: build with nvcc");
}

// One thread block per head and tile of rows.
Grid grid_of(int64_t batch, int64_t heads, int64_t rows) {
  return {batch * heads * ceil_div(rows, kAttentionTile), kAttentionThreads};
}

}  // namespace

cudaError_t load_attention(const AttentionKernels& kernels) {
  if (!kernels.attend) fail_without_nvcc();
  return load_all({kernels.attend, kernels.differentiate_queries, kernels.differentiate_keys, kernels.differentiate_bias});
}

cudaError_t attend(const AttentionKernels& kernels, const AttentionKernel& p, cudaStream_t stream) {
  return launch(kernels.attend, grid_of(p.batch, p.heads, p.rows), stream, p);
}

cudaError_t differentiate(const AttentionKernels& kernels, const AttentionKernel& p, cudaStream_t stream) {
  const cudaError_t status = launch(kernels.differentiate_queries, grid_of(p.batch, p.heads, p.rows), stream, p);
  if (status != cudaSuccess) return status;
  return launch(kernels.differentiate_keys, grid_of(p.batch, p.groups, p.columns), stream, p);
}

cudaError_t differentiate_bias(const AttentionKernels& kernels, const AttentionKernel& p, cudaStream_t stream) {
  const auto& [at, batch, heads, rows] = p.bias_gradient;
  const Grid tiles = grid_of(batch, heads, rows);
  return launch(kernels.differentiate_bias, {tiles.blocks * ceil_div(p.columns, kAttentionTile), tiles.threads}, stream, p);
}

#ifdef HOSTWEAVE_WITHOUT_NVCC

cudaError_t load_packing() { fail_without_nvcc(); }
cudaError_t place_sequences(const PackedSequences&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t fill_outside(const OutsideSequences&, cudaStream_t) { return cudaErrorNotSupported; }
bool has_sums() { return false; }
cudaError_t add_rows(const AddedRows&, cudaStream_t) { return cudaErrorNotSupported; }

#else

__global__ void place_sequences_of(PackedSequences p);
__global__ void fill_outside_of(OutsideSequences p);
__global__ void add_rows_of(AddedRows p);

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

bool has_sums() {
  HW_CHECK(load(add_rows_of));
  return true;
}

cudaError_t add_rows(const AddedRows& p, cudaStream_t stream) {
  return launch(add_rows_of, {ceil_div(p.batch * p.heads * p.rows * p.size, 8 * kAttentionThreads), kAttentionThreads}, stream,
                p);
}

#endif

}  // namespace hw
