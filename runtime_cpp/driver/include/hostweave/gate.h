// Has calls of all ranks begin together: `measure`.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace hw {

// Holds streams of all ranks, so that what is enqueued on them meanwhile begins on all devices together, and without the host.
// Where the host is the device it holds nothing.
class Gate {
 public:
  explicit Gate(int ranks);
  ~Gate();
  Gate(Gate&&) = delete;

  // What comes later on the stream waits until all ranks have enqueued this round. The first one is not held.
  void hold(cudaStream_t stream, uint32_t round) const;
  // Each rank says so, from round 1 on, of one round after another.
  void enqueued(uint32_t round) {
    if (round > 0 && ++enqueued_ == ranks_ * round) open(round);
  }

  struct Opening {  // for good, at its end
    explicit Opening(const Gate& opened) : gate(opened) {}
    ~Opening() { gate.open(); }
    Opening(Opening&&) = delete;
    const Gate& gate;
  };

 private:
  void open(uint32_t round = INT32_MAX) const;

  uint32_t ranks_;
  std::atomic<uint32_t> enqueued_ = 0;
  uint32_t* opened_ = nullptr;  // the last round, in memory of the host that devices read
};

}  // namespace hw
