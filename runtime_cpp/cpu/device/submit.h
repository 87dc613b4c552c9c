// What the CUDA calls share.
#pragma once
#include <vector>

#include "machine.h"

namespace hostweave::cpu {

cudaError_t no_such_stream(cudaStream_t stream, const char* call);
// Enqueues an op that touches memory of the stream's device, or also of its peers.
cudaError_t submit(Lock& lock, OpPtr op, cudaStream_t stream, bool peers_allowed = false);
// Blocks the host until these ops are done.
cudaError_t wait_for(Lock& lock, const std::vector<OpPtr>& ops, const char* what);
cudaError_t wait_for_device(Lock& lock, int device);

}  // namespace hostweave::cpu
