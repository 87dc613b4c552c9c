// Starts calls of all ranks at the same time, for Instance::measure.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace hw {

// Blocks streams of all ranks while work is enqueued. Then the work starts on all devices at once, without launch overhead. Does
// nothing on the CPU target.
class Gate {
 public:
  explicit Gate(int ranks);
  ~Gate();
  Gate(Gate&&) = delete;

  // Blocks later work on the stream until all ranks have called `enqueued` for this round. Does nothing in round 0.
  void hold(cudaStream_t stream, uint32_t round) const;
  // Each rank calls this function once per round.
  void enqueued(uint32_t round) {
    if (round > 0 && ++enqueued_ == ranks_ * round) open(round);
  }

  struct Opening {  // RAII: the destructor opens the gate permanently.
    explicit Opening(const Gate& opened) : gate(opened) {}
    ~Opening() { gate.open(); }
    Opening(Opening&&) = delete;
    const Gate& gate;
  };

 private:
  void open(uint32_t round = INT32_MAX) const;

  uint32_t ranks_;
  std::atomic<uint32_t> enqueued_ = 0;
  uint32_t* opened_ = nullptr;  // last opened round, in host memory that devices read
};

}  // namespace hw
