// A program on every rank of a world, run with arrays in the caller's memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/world.h"

namespace hw {

// A contiguous local array.
struct Array {
  void* data = nullptr;
  Shape shape;
  size_t bytes = 0;
  int device = -1;          // -1: in host memory. Outputs are there or on the rank's GPU, inputs on any
  Shape global_shape = {};  // of the global array, where that is known
};

struct Call {
  std::vector<std::vector<Array>> inputs, outputs;  // [rank][parameter], in the order of the program's table
};

struct Timing {
  double enqueue_us;  // host time of the program's `run`
  double total_ms;    // from the first to the last of its work on the device
};

class Runner {
 public:
  // Both live longer than the runner. Throws what making the program on some rank throws.
  // With `measures` it takes the fastest algorithms of products.
  Runner(World& world, const ProgramTable& program, bool measures = false, const GiveUp& give_up = {});
  ~Runner();
  Runner(Runner&&) = delete;

  // Runs the calls one after another and waits for the last. All have the shapes of the first. The host waits for
  // nothing in between: inputs are copied in, and outputs out, on the stream that the program is called on. With `poison`
  // that stream first fills the outputs and the program's temporaries with NaN. Inputs on GPUs of other ranks are fetched
  // before the first call. Throws ExecutionError where the ranks stand still for as long as the schedule says.
  void run(const Schedule& schedule, std::vector<Call> calls, bool poison, const GiveUp& give_up = {});

  // The times of `repetitions` calls after `warmups` others, [rank][repetition]. Ranks begin each call together, with
  // the inputs in place.
  std::vector<std::vector<Timing>> measure(const Schedule& schedule, const Call& call, int warmups, int repetitions,
                                           const GiveUp& give_up = {});

 private:
  class Seat;
  class Watch;
  void prepare(const Schedule& schedule, std::vector<Call>& calls, const GiveUp& give_up);

  void finish(Seat& seat);

  World& world_;
  const ProgramTable& program_;
  bool measures_;
  std::timed_mutex turn_;                     // to prepare and run: calls of several threads do not mix
  std::vector<std::unique_ptr<Seat>> seats_;  // one a rank
};

}  // namespace hw
