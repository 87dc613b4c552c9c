// Milestones: marks on streams that the host can query. A milestone shows that the preceding op on the stream has ended.
//
// On CUDA outside of captures, a milestone is an event. In a capture on CUDA, a milestone is a kernel that increments a word, so
// that a graph remains a chain of kernels. On the CPU device, a milestone is a word that the device increments.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/hidden.h"

namespace hw {

class Milestones {
 public:
  Milestones();

  static constexpr int kNone = -1;

  // Prepares a capture. Returns true if the capture can have milestones: on CUDA only if `wanted`, because milestones cost time.
  // Throws ExecutionError if CUDA fails.
  bool prepare_capture(bool wanted);
  // Puts a milestone after the last op of a stream. In a capture on CUDA, returns kNone if `prepare_capture` has not yet returned
  // true, or if all milestones for graphs are in use. Throws ExecutionError if CUDA fails. Only one thread at a time may call
  // this function.
  int set(cudaStream_t stream, bool is_captured);
  // Lets `set` use the milestone again.
  void give_back(int milestone);
  // True if the op before the milestone has ended at least `times` times. For an event, `times` is 1. Any thread may
  // call this function.
  bool is_done(int milestone, int64_t times) const;

 private:
  struct All;
  Hidden<All> all_;
};

}  // namespace hw
