// Resources of a channel for collectives inside kernels; see hw::Terms and hw::LandedBlocks.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "hostweave/check.h"
#include "hostweave/launch.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/terms.h"

namespace hw {

class TermExchange {
 public:
  // All programs of a rank share the resources of a channel.
  TermExchange(Rank& rank, const Channel& channel);

  // Collective when first called for a channel. Kernels exchange data if all GPUs have peer access; otherwise NCCL gathers it
  // before the kernel.
  void prepare();

  // Orders all calls of the rank that exchange data in kernels. All ranks must count these exchanges equally.
  static CallOrder& calls(Rank& rank);

  // Makes the first argument of a kernel: hw::Terms or hw::LandedBlocks.
  template <class Terms>
  Terms terms(const typename Terms::Element* own, int64_t count, const MoreArrays& more, cudaStream_t stream) const {
    if (CallLog* const log = CallLog::current()) log->over(channel_);  // the kernel waits for the other ranks
    const int64_t bytes = count * static_cast<int64_t>(sizeof *own);
    const void* const all = gathered(own, bytes, Terms::kMostBytes, Terms::kScatters, more, stream);
    Terms terms{own, count, static_cast<const typename Terms::Element*>(all), exchange(), 0};
    if constexpr (Terms::kMostOfEach > 1) terms.more = more;
    return terms;
  }

  int64_t multiprocessors() const;

  struct Shared;

 private:
  const Exchange& exchange() const;
  // Gathers blocks of `bytes` from all ranks by NCCL, on the stream, and the arrays of `more`. Returns null if kernels exchange
  // them. With `scatters`, `own` has a block for each rank.
  const void* gathered(const void* own, int64_t bytes, int64_t most, bool scatters, const MoreArrays& more,
                       cudaStream_t stream) const;

  const Channel& channel_;
  Shared& shared_;
};

// Ends the waits of kernels of an aborted communicator.
void abort_exchanges(ncclComm_t comm);

// An array that a kernel gathers besides its input: a block of `count` elements from each rank.
template <class T>
MoreArrays::Array also_gathered(const T* own, T* all, int64_t count) {
  return {reinterpret_cast<const char*>(own), reinterpret_cast<char*>(all), count * static_cast<int64_t>(sizeof(T))};
}

// Like launch_pdl, for a kernel whose first argument is `Terms` of `count` elements. The kernel also gathers `arrays`. All thread
// blocks must be resident, because they wait for thread blocks of other ranks.
template <class Terms, class... Params, class... Args>
cudaError_t launch_gathers(void (*kernel)(Terms, Params...), Grid grid, cudaStream_t stream, const TermExchange& exchange,
                           std::initializer_list<MoreArrays::Array> arrays, const typename Terms::Element* own, int64_t count,
                           const Args&... args) {
  MoreArrays more{};
  for (const MoreArrays::Array& array : arrays) more.arrays[more.count++] = array;
  if (more.count > 0 && grid.is_flexible) {  // enough threads to move the blocks
    grid.threads = kThreads;
    grid.blocks = clamped(ceil_div(more.bytes(), kPartBytes), grid.blocks, kMaxBlocks);
  }
  const int64_t most = Terms::kMostOfEach * exchange.multiprocessors();
  grid.blocks = smaller(grid.blocks, clamped(most / grid.cluster, 1, kMaxBlocks) * grid.cluster);
  grid.resident = grid.resident || Terms::kMostOfEach > 1;
  return launch_pdl(kernel, grid, stream, exchange.terms<Terms>(own, count, more, stream), args...);
}

// The same without further arrays.
template <class Terms, class... Params, class... Args>
cudaError_t launch_exchange(void (*kernel)(Terms, Params...), Grid grid, cudaStream_t stream, const TermExchange& exchange,
                            const Args&... args) {
  return launch_gathers(kernel, grid, stream, exchange, {}, args...);
}

}  // namespace hw
