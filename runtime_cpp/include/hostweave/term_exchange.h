// Resources of a channel for all-reduces inside kernels; see hw::Terms.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/check.h"
#include "hostweave/launch.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/terms.h"

namespace hw {

class TermExchange {
 public:
  // All programs of the rank share the resources of a channel.
  TermExchange(Rank& rank, const Channel& channel);

  // Collective at the first call per channel. Kernels exchange packets if all GPUs have peer access; otherwise NCCL gathers the
  // terms before the kernel.
  void prepare();

  // Orders calls that exchange terms, because packets are counted.
  static CallOrder& calls(Rank& rank);

  template <class T, int kRanks>
  Terms<T, kRanks> terms(const T* own, int64_t count, cudaStream_t stream) const {
    if (CallLog* const log = CallLog::current()) log->over(channel_);  // the kernel waits for the other ranks
    return {own, count, static_cast<const T*>(gathered(own, count * static_cast<int64_t>(sizeof(T)), stream)), exchange(), 0};
  }

  // Maximum number of concurrent blocks. All blocks must be resident, because they wait for blocks of other ranks.
  int64_t most_blocks() const;

  struct Shared;

 private:
  const Exchange& exchange() const;
  // Terms of all ranks, gathered on the stream; null if kernels exchange packets.
  const void* gathered(const void* own, int64_t bytes, cudaStream_t stream) const;

  const Channel& channel_;
  Shared& shared_;
};

// Ends the waits of kernels of an aborted communicator.
void abort_exchanges(ncclComm_t comm);

// Like launch_pdl, for a kernel whose first argument is this rank's term of `count` elements.
template <class T, int kRanks, class... Params, class... Args>
cudaError_t launch_all_reduce(void (*kernel)(Terms<T, kRanks>, Params...), Grid grid, cudaStream_t stream,
                              const TermExchange& exchange, const T* own, int64_t count, const Args&... args) {
  grid.blocks = smaller(grid.blocks, clamped(exchange.most_blocks() / grid.cluster, 1, kMaxBlocks) * grid.cluster);
  return launch_pdl(kernel, grid, stream, exchange.terms<T, kRanks>(own, count, stream), args...);
}

}  // namespace hw
