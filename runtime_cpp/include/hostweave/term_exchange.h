// Resources of a channel for collectives inside kernels; see hw::Terms and hw::LandedBlocks.
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
  // All programs of a rank share the resources of a channel.
  TermExchange(Rank& rank, const Channel& channel);

  // The first call for a channel is collective. If all GPUs of the channel have peer access, kernels exchange data. Otherwise,
  // and on the CPU device, NCCL exchanges the data before the kernel.
  void prepare();

  // Returns the CallOrder of the rank's calls that exchange data in kernels. All ranks must make these calls in the same order.
  static CallOrder& calls(Rank& rank);

  // Makes the first argument of a kernel: hw::Terms or hw::LandedBlocks.
  template <class Terms>
  Terms terms(const typename Terms::Element* own, int64_t count, cudaStream_t stream) const {
    if (CallLog* const log = CallLog::current()) log->over(channel_);  // The kernel waits for the other ranks.
    const int64_t bytes = count * static_cast<int64_t>(sizeof *own);
    const void* const all = gathered(own, bytes, Terms::kMostBytes, Terms::kScatters, stream);
    Terms made{own, count, static_cast<const typename Terms::Element*>(all), exchange(), 0};
    if constexpr (Terms::kScatters) made.is_sent = take_sent(own);
    return made;
  }

  // Makes the argument for the result of a kernel that sends blocks of `count` elements. The next exchange must be the
  // reduce-scatter of these blocks.
  template <class T, int kRanks>
  SentBlocks<T, kRanks> sent(T* own, int64_t count) const {
    const bool is_sent = count > 0 && note_sent(own);
    return {{own, count, is_sent ? nullptr : own, exchange(), 0, false}, own, {}};
  }

  struct Shared;

 private:
  const Exchange& exchange() const;
  bool note_sent(const void* own) const;  // false if NCCL will send the blocks
  bool take_sent(const void* own) const;  // true if a kernel has sent these blocks
  // Gathers blocks of `bytes` bytes from all ranks by NCCL, on the stream. With `scatters`, `own` has a block for each rank.
  // Returns null only if kernels exchange the blocks.
  const void* gathered(const void* own, int64_t bytes, int64_t most, bool scatters, cudaStream_t stream) const;

  const Channel& channel_;
  Shared& shared_;
};

// Ends the waits of kernels of an aborted communicator.
void abort_exchanges(ncclComm_t comm);

// Like launch_pdl, for a kernel whose first argument is `Terms` of `count` elements. Launches no more thread blocks than can be
// resident at once, because thread blocks wait for thread blocks of other ranks.
template <class Terms, class... Params, class... Args>
cudaError_t launch_exchange(void (*kernel)(Terms, Params...), Grid grid, cudaStream_t stream, const TermExchange& exchange,
                            const typename Terms::Element* own, int64_t count, const Args&... args) {
  grid.blocks = smaller(grid.blocks, clamped(multiprocessors() / grid.cluster, 1, kMaxBlocks) * grid.cluster);
  return launch_pdl(kernel, grid, stream, exchange.terms<Terms>(own, count, stream), args...);
}

}  // namespace hw
