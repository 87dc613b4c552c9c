// A program on one rank of a group.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/call_log.h"
#include "hostweave/device_memory.h"
#include "hostweave/gate.h"
#include "hostweave/member.h"
#include "hostweave/staging.h"
#include "hostweave/standstill.h"
#include "hostweave/straighten.h"
#include "hostweave/streams.h"

namespace hw {

// True if a stream is being captured, or if a failed call has invalidated its capture. Throws CaptureError for the default stream
// while another stream is captured.
bool is_captured(cudaStream_t stream);

// Detects that graph launches by the application make no progress. Each launch sets a word at its start, and records an event at
// its end.
class Pulse {
 public:
  Pulse();
  ~Pulse();

  void begin(cudaStream_t caller);
  void end(cudaStream_t caller);
  // True if a launch is running, and no launch has started since the last call of this function.
  bool stands_still();

 private:
  DeviceMemory set_;           // memory from which a launch sets the word
  uint32_t* begun_ = nullptr;  // the word, in host memory
  OwnStream stream_;
  Events fork_{1}, join_{1}, done_{1};
};

// Progress of a program's calls. Only one thread at a time makes calls. Any thread may read the progress.
class Progress {
 public:
  CallLog::State look();

  CallLog log;
  Pulse pulse;  // for graphs that the application launches

 private:
  using Clock = std::chrono::steady_clock;

  std::mutex mutex_;                                           // guards the next member
  Clock::time_point stands_since_ = Clock::time_point::max();  // time of the first look() at which a graph launch stood still
};

// A call as a CUDA graph. The member must outlive this object. An abort may destroy the CUDA graph earlier.
class Graph {
 public:
  // Takes ownership of a captured graph, and uploads the graph. Without this upload, the first launch would upload the graph,
  // perhaps behind work that waits for other ranks. The stream must be idle.
  Graph(Member& member, cudaGraph_t graph, cudaStream_t stream, CallLog& log);
  ~Graph();
  Graph(Graph&&) = delete;

  void launch(cudaStream_t stream) const;

 private:
  Member& member_;
  cudaGraphExec_t exec_ = nullptr;
  LaunchEvents events_;
  CallLog& log_;
  LoggedOps* ops_;
};

// Policy for launching calls as graphs.
enum class Graphs {
  never,
  noted,     // no graphs, but records the call's arrays for later calls with `repeated`
  repeated,  // a graph if a call with the same arrays and shapes is recorded
  all,
};

struct Timing {
  double enqueue_us;            // host time of the program's `enqueue`
  double total_ms;              // device time from the first to the last work
  std::vector<float> marks_ms;  // times from the first work to each mark
};

class Instance {
 public:
  // The member must have the channels of the program, and must outlive this object. With `measures`, matmuls use the fastest
  // measured algorithms. With `marks_graphs`, reports of hangs also name lines in CUDA graphs.
  Instance(Member& member, const ProgramTable& program, bool measures = false, bool marks_graphs = false);
  ~Instance();
  Instance(Instance&&) = delete;

  struct Input {
    Shape shape;         // local shape
    Shape global_shape;  // global shape; no dims if all ranks hold blocks of equal shape

    bool operator==(const Input&) const = default;
  };
  // Prepares for inputs of these shapes. Returns the local output shapes. Throws ArgumentError if the shapes do not match the
  // program. Throws CaptureError if `caller` is being captured, because memory cannot be allocated in a capture.
  std::vector<Shape> prepare(const std::vector<Input>& inputs, cudaStream_t caller);
  // Calls the program with contiguous arrays of the shapes of the last `prepare`. The inputs are the bound inputs of the table,
  // and `inputs`. On CUDA, only enqueues the work. On the CPU target, also waits for the work of this rank. If `graphs` requests
  // a graph that does not exist yet, captures the call first. If `caller` is being captured, adds the call to that capture.
  // Throws CaptureError if a capture fails; the program remains usable.
  void run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
           cudaStream_t caller, Graphs graphs);
  // Makes the staged calls with their copies, and waits until they are done. All ranks call this function together. With
  // `poison`, sets all bytes of outputs and temporaries to 0xff before each call, which is NaN in floats.
  void run_staged(const Schedule& schedule, const Staging& staging, bool poison);
  // Times `repetitions` repetitions of the first staged call, after `warmups` untimed repetitions. All ranks start each
  // repetition together, except the very first, timed or untimed. The times exclude copies of arrays.
  std::vector<Timing> measure(const Schedule& schedule, const Staging& staging, int warmups, int repetitions, Gate& gate);
  // Captures a call as a graph. Throws CaptureError if the capture fails.
  std::unique_ptr<Graph> capture(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  // Launches a captured call, ordered with the calls by `run`. Throws CaptureError if `caller` is being captured.
  void launch(const Schedule& schedule, const Graph& graph, cudaStream_t caller);

  // Any thread may call these two functions.
  CallLog::State progress();
  Standstill standstill();
  // Number of cached graphs.
  int64_t graphs() const;
  // Number of calls whose arrays or shapes differed from those of all recorded calls. Calls with Graphs::never, and calls in a
  // capture by the application, do not count.
  int64_t unseen() const { return unseen_; }

 private:
  // Arrays of a call, and the graph of the call if there is one.
  struct Seen {
    std::vector<void*> data;
    std::shared_ptr<const std::vector<Input>> shapes;
    std::unique_ptr<Graph> graph;
  };

  // Sets the arrays of the next calls.
  void take(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  template <class Work>
  void call(cudaStream_t caller, const Work& enqueue_or_launch);  // logs the call
  void enqueue(cudaStream_t caller, bool is_marked = false);
  void enqueue_captured(cudaStream_t caller);
  std::unique_ptr<Graph> capture_taken();
  void launch(const Graph& graph, cudaStream_t caller) const;       // enqueues the graph in order with the calls
  const Graph* graph_of_taken(Graphs graphs);                       // null: the call is made without a graph
  std::vector<void*> memory() const;                                // addresses of the temporaries' memory
  void fill(const Staging::Call& call, cudaStream_t caller) const;  // with 0xff bytes: the outputs and temporaries
  void finish(cudaStream_t caller) const;
  template <class Work>
  void or_stop(const Work& work);  // a failure stops the other ranks

  Member& member_;
  const ProgramTable& program_;
  bool measures_, marks_graphs_;
  void* instance_ = nullptr;
  std::vector<Tensor> inputs_, outputs_;
  std::shared_ptr<const std::vector<Input>> shapes_;  // input shapes; one object for all recorded calls with these shapes
  std::optional<Progress> progress_;
  std::list<Seen> seen_;       // most recent first
  std::vector<void*> memory_;  // memory of temporaries that the graphs in seen_ use
  int64_t unseen_ = 0;
};

}  // namespace hw
