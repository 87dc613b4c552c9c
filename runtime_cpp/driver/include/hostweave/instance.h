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
#include <utility>
#include <vector>

#include "hostweave/abi.h"
#include "hostweave/call_log.h"
#include "hostweave/member.h"
#include "hostweave/standstill.h"
#include "hostweave/straighten.h"
#include "hostweave/streams.h"

namespace hw {

// True if a stream is being captured, or its capture was invalidated by a failed call.
bool is_captured(cudaStream_t stream);

// Progress of a graph that the application launches: each launch sets a word at its start, and records an event at its end.
class Pulse {
 public:
  Pulse();
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  void begin(cudaStream_t caller);
  void end(cudaStream_t caller);
  // True if a launch is running and none has started since the last call.
  bool stands_still();

 private:
  explicit Pulse(std::nullptr_t) {}

  void* set_ = nullptr;        // on the device
  uint32_t* begun_ = nullptr;  // on the host
  cudaStream_t stream_ = nullptr;
  Events fork_{1}, join_{1}, done_{1};
};

// Progress of a program's calls. One thread makes the calls; any thread may read the progress.
class Progress {
 public:
  CallLog& log() { return log_; }
  // Watches graphs that the application captured and launches. `look` reports the time since their last progress.
  Pulse& pulse() { return pulse_; }
  CallLog::State look();

 private:
  using Clock = std::chrono::steady_clock;

  CallLog log_;
  Pulse pulse_;
  std::mutex mutex_;           // guards moved_
  Clock::time_point moved_{};  // last time that graph launches made progress or were done
};

// A call as a CUDA graph. The member must outlive it, and destroys it on abort.
class Graph {
 public:
  // Takes over a captured graph. The stream must be idle. Uploads the graph before returning, because an upload at launch could
  // queue behind work that waits for other ranks.
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

// Inputs of many calls: bound addresses, and null for inputs that each call passes.
class Table {
 public:
  explicit Table(std::vector<std::optional<void*>> bound) : bound_(std::move(bound)) {}

  // Throws ArgumentError if the number of `inputs` differs from the number of unbound inputs.
  void fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const;

 private:
  std::vector<std::optional<void*>> bound_;
};

// Policy for launching calls as graphs.
enum class Graphs {
  never,
  noted,     // no graphs, but records the arrays, for a later `repeated`
  repeated,  // if the arrays are the same as in an earlier call
  all,
};

class Instance {
 public:
  // The member must outlive it and have the program's channels. With `measures`, matmuls use the fastest measured algorithms.
  // With `marks_graphs`, a report of a hang names lines in graphs on CUDA, too.
  Instance(Member& member, const ProgramTable& program, bool measures = false, bool marks_graphs = false);
  ~Instance();
  Instance(Instance&&) = delete;

  struct Input {
    Shape shape;         // local shape
    Shape global_shape;  // global shape; no dims if all ranks hold blocks of one shape

    bool operator==(const Input&) const = default;
  };
  // Prepares for inputs of these shapes. Returns the local output shapes. Throws ArgumentError if they do not fit the program,
  // and CaptureError if `caller` is being captured, because nothing can be allocated then.
  std::vector<Shape> prepare(const std::vector<Input>& inputs, cudaStream_t caller);
  // Calls the program with contiguous arrays of the shapes of the last `prepare`: inputs of the table, and `inputs`. On CUDA it
  // only enqueues; on the CPU target it returns when the rank is done. A call that is to be a graph is captured first if needed.
  // Throws CaptureError if that fails, or if the call fails while `caller` is being captured; the program remains usable.
  void run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
           cudaStream_t caller, Graphs graphs);
  // Captures such a call as a graph. Throws CaptureError.
  std::unique_ptr<Graph> capture(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  // Launches a captured call, ordered like a `run`.
  void launch(const Schedule& schedule, const Graph& graph, cudaStream_t caller);

  // Runs `work` during one use of the member. StagedCalls makes several calls in it. A failure is reported to the other ranks.
  void in_use(const Schedule& schedule, const std::function<void()>& work);
  // Sets the arrays of the next call.
  void take(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  // Makes a call; `work` enqueues it by `enqueue`.
  void make_call(cudaStream_t caller, const std::function<void()>& work);
  void enqueue(cudaStream_t caller, bool is_marked = false);
  // Fills the program's temporaries with NaN.
  void poison(cudaStream_t caller) const;
  Member& member() const { return member_; }
  size_t inputs() const { return inputs_.size(); }

  // From any thread: progress of the calls, and positions of the streams in the first unfinished call.
  CallLog::State progress();
  Standstill standstill();
  // Number of calls whose graphs are cached.
  int64_t graphs() const;
  // Number of recorded calls whose arrays were new.
  int64_t unseen() const { return unseen_; }

 private:
  // Arrays of a call, and its graph if it was launched as one.
  struct Seen {
    std::vector<void*> data;
    std::shared_ptr<const std::vector<Input>> shapes;
    std::unique_ptr<Graph> graph;
  };

  void enqueue_captured(cudaStream_t caller);
  std::unique_ptr<Graph> capture_taken();
  void launch(const Graph& graph, cudaStream_t caller) const;  // ordered among the calls
  const Graph* graph_of_taken(Graphs graphs);                  // null: a plain call
  std::vector<void*> memory() const;                           // addresses of the temporaries' memory
  void or_stop(const std::function<void()>& work);

  Member& member_;
  const ProgramTable& program_;
  bool measures_, marks_graphs_;
  void* instance_ = nullptr;
  std::vector<Tensor> inputs_, outputs_;
  std::shared_ptr<const std::vector<Input>> shapes_;  // input shapes; one object for all calls with these arguments
  std::optional<Progress> progress_;
  std::list<Seen> seen_;       // most recent first
  std::vector<void*> memory_;  // memory that their graphs use
  int64_t unseen_ = 0;
};

}  // namespace hw
