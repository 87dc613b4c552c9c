// Launches of the fake runtime: a kernel becomes a node of the graph that the stream captures.
#pragma once
#include <cuda_runtime_api.h>

namespace hw {

template <int kElements>
int grid_of_elements(int64_t bytes) {
  return static_cast<int>(bytes / kElements) + 1;
}
template <class Kernel>
cudaError_t load(Kernel) {
  return cudaSuccess;
}
template <class Kernel, class... Args>
cudaError_t launch(Kernel, int, cudaStream_t stream, const Args&...) {
  stream->last = new Node{cudaGraphNodeTypeKernel, 100};
  stream->captures->nodes.push_back(stream->last);
  return cudaSuccess;
}

}  // namespace hw
