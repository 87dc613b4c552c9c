// What the ranks of a channel share so that a kernel adds up a term of each: see hw::Terms.
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
  // All programs of the rank share what they have of a channel.
  TermExchange(Rank& rank, const Channel& channel);

  // Once a channel: every rank of it comes here. Then kernels exchange packets where all these GPUs reach each other's memory;
  // elsewhere NCCL gathers the terms before the kernel.
  void prepare();

  // Calls that exchange terms follow one another, as packets are counted.
  static CallOrder& calls(Rank& rank);

  template <class T, int kRanks>
  Terms<T, kRanks> terms(const T* own, int64_t count, cudaStream_t stream) const {
    return {own, count, static_cast<const T*>(gathered(own, count * static_cast<int64_t>(sizeof(T)), stream)), exchange(), 0};
  }

  // That run at once, as they must: they wait for those of other ranks.
  int64_t most_blocks() const;

  struct Shared;

 private:
  const Exchange& exchange() const;
  // The terms of all ranks, gathered on the stream; null where kernels fetch them.
  const void* gathered(const void* own, int64_t bytes, cudaStream_t stream) const;

  const Channel& channel_;
  Shared& shared_;
};

// The kernels of a communicator that is aborted wait no longer.
void abort_exchanges(ncclComm_t comm);

// As launch_pdl, of a kernel whose first argument is this rank's term, of `count` elements.
template <class T, int kRanks, class... Params, class... Args>
cudaError_t launch_all_reduce(void (*kernel)(Terms<T, kRanks>, Params...), Grid grid, cudaStream_t stream,
                              const TermExchange& exchange, const T* own, int64_t count, const Args&... args) {
  grid.blocks = smaller(grid.blocks, exchange.most_blocks());
  return launch_pdl(kernel, grid, stream, exchange.terms<T, kRanks>(own, count, stream), args...);
}

}  // namespace hw
