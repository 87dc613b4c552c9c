// A program on one rank of a group.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/member.h"
#include "hostweave/streams.h"

namespace hw {

// How far the calls of a program have come. One thread makes the calls, any may look.
class Progress {
 public:
  struct State {
    int64_t made;            // calls
    int64_t done;            // of them
    double waiting_seconds;  // since the first that is not done was made; 0 where all are
  };

  void begin();
  // The call is enqueued on `caller`. Throws ExecutionError.
  void end(cudaStream_t caller);
  State look();

 private:
  using Clock = std::chrono::steady_clock;
  // A call whose end an event marks. Two are enough: when the older is done, the newest becomes the older.
  struct Mark {
    int event;
    int64_t call = 0;
    Clock::time_point at{};
  };

  std::mutex mutex_;
  Events events_{2};
  Mark older_{0}, newest_{1};
  int64_t made_ = 0, done_ = 0;
  bool enqueuing_ = false;
  Clock::time_point began_{};
};

// The inputs of many calls: what is bound in all of them, and nothing where a call has an input of its own.
class Table {
 public:
  explicit Table(std::vector<std::optional<void*>> bound) : bound_(std::move(bound)) {}

  // Throws ArgumentError unless `inputs` are as many as are not bound.
  // Throws ArgumentError unless `inputs` are as many as are not bound.
  void fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const;

 private:
  std::vector<std::optional<void*>> bound_;
};

class Instance {
 public:
  // The member outlives it, and has the channels of the program.
  Instance(Member& member, const ProgramTable& program);
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  struct Input {
    Shape shape;  // of this rank's block
    Shape whole;  // of the global array, or of no dims where all ranks hold blocks of one shape
  };
  // Gets ready for such inputs. Returns the local shapes of the outputs. Throws ArgumentError where they do not fit the
  // program.
  std::vector<Shape> prepare(const std::vector<Input>& inputs);
  // Calls the program with contiguous arrays of the shapes of the last `prepare`: those of the table, and `inputs`. On CUDA it
  // only enqueues; on the CPU target it returns when the rank is done.
  void run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
           cudaStream_t caller);

  Progress::State progress();  // asked from any thread

 private:
  Member& member_;
  const ProgramTable& program_;
  void* instance_ = nullptr;
  std::vector<Tensor> inputs_, outputs_;
  std::optional<Progress> progress_;
};

}  // namespace hw
