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
#include "hostweave/member.h"
#include "hostweave/straighten.h"
#include "hostweave/streams.h"

namespace hw {

// Whether a stream is being captured, or was until a call failed.
bool is_captured(cudaStream_t stream);

// What shows from outside how far the launches of a graph have come: a word that each one sets as it begins, and an event that it
// records as it ends.
class Pulse {
 public:
  Pulse();
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  void begin(cudaStream_t caller);
  void end(cudaStream_t caller);
  // Whether a launch is under way, and none has begun since the last look.
  bool stands_still();

 private:
  explicit Pulse(std::nullptr_t) {}

  void* set_ = nullptr;        // on the device
  uint32_t* begun_ = nullptr;  // on the host
  cudaStream_t stream_ = nullptr;
  Events fork_{1}, join_{1}, done_{1};
};

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
  // Of calls that somebody captures, and launches without telling. `look` has the time since one of these was seen to go on.
  Pulse& pulse() { return pulse_; }
  State look();

 private:
  using Clock = std::chrono::steady_clock;
  // A call whose end an event marks. Two are enough: when the older is done, the newest becomes the older. Of more calls in
  // flight, those between the two are not known to be done before the newest is.
  struct Mark {
    int event;
    int64_t call = 0;
    Clock::time_point at{};
  };

  void advance();

  std::mutex mutex_;
  Events events_{2};
  Mark older_{0}, newest_{1};
  int64_t made_ = 0, done_ = 0;
  bool enqueuing_ = false;
  Clock::time_point began_{};
  Pulse pulse_;
  Clock::time_point moved_{};  // when launches of graphs were last seen to go on, or to be done
};

// A call as a graph. The member, which ends it when it is aborted, outlives it.
class Graph {
 public:
  // Takes over what was captured on a stream, on which there is no work. It is there when this returns: were a launch to upload
  // it, it could stand behind what waits for other ranks.
  Graph(Member& member, cudaGraph_t graph, cudaStream_t stream);
  ~Graph();
  Graph(Graph&&) = delete;

  void launch(cudaStream_t stream) const;

 private:
  Member& member_;
  cudaGraphExec_t exec_ = nullptr;
  LaunchEvents events_;
};

// The inputs of many calls: what is bound in all of them, and nothing where a call has an input of its own.
class Table {
 public:
  explicit Table(std::vector<std::optional<void*>> bound) : bound_(std::move(bound)) {}

  // Throws ArgumentError unless `inputs` are as many as are not bound.
  void fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const;

 private:
  std::vector<std::optional<void*>> bound_;
};

// When a call is launched as a graph.
enum class Graphs {
  never,
  noted,     // not yet: which arrays come again is known from then on
  repeated,  // where its arrays are those of a call before
  all,
};

class Instance {
 public:
  // The member outlives it, and has the channels of the program. With `measures` it takes the fastest algorithms of products.
  Instance(Member& member, const ProgramTable& program, bool measures = false);
  ~Instance();
  Instance(Instance&&) = delete;

  struct Input {
    Shape shape;         // of this rank's block
    Shape global_shape;  // of the global array, or of no dims where all ranks hold blocks of one shape

    bool operator==(const Input&) const = default;
  };
  // Gets ready for such inputs. Returns the local shapes of the outputs. Throws ArgumentError where they do not fit the
  // program, CaptureError where `caller`, whose call this is for, is being captured: nothing can be allocated then.
  std::vector<Shape> prepare(const std::vector<Input>& inputs, cudaStream_t caller);
  // Calls the program with contiguous arrays of the shapes of the last `prepare`: those of the table, and `inputs`. On CUDA it
  // only enqueues; on the CPU target it returns when the rank is done. Where it is a graph that is not there yet, it is captured.
  // Throws CaptureError where that fails, or a call while `caller` is being captured, which fails nothing else.
  void run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
           cudaStream_t caller, Graphs graphs);
  // The same call as a graph. Throws CaptureError.
  std::unique_ptr<Graph> capture(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  // Launches a call that was captured, as `run` enqueues it.
  void launch(const Schedule& schedule, const Graph& graph, cudaStream_t caller);

  // Of StagedCalls, which makes several calls in one use of the member. Where `work` fails, the other ranks are told.
  void in_use(const Schedule& schedule, const std::function<void()>& work);
  // Which arrays the next call is with.
  void take(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs);
  // Makes a call, which `work` enqueues by `enqueue`.
  void make_call(cudaStream_t caller, const std::function<void()>& work);
  void enqueue(cudaStream_t caller) const { program_.calls.run(instance_, inputs_.data(), outputs_.data(), caller); }
  // Fills the program's temporaries with NaN.
  void poison(cudaStream_t caller) const;
  Member& member() const { return member_; }
  size_t inputs() const { return inputs_.size(); }

  Progress::State progress();  // asked from any thread
  // How many graphs of calls it keeps.
  int64_t graphs() const;
  // How many calls that are noted had arrays of which it has no note.
  int64_t unseen() const { return unseen_; }

 private:
  // The arrays of a call, and its graph where it was launched as one.
  struct Seen {
    std::vector<void*> data;
    std::shared_ptr<const std::vector<Input>> shapes;
    std::unique_ptr<Graph> graph;
  };

  void enqueue_captured(cudaStream_t caller);
  std::unique_ptr<Graph> capture_taken();
  void launch(const Graph& graph, cudaStream_t caller) const;  // in its place among the calls
  const Graph* graph_of_taken(Graphs graphs);                  // null: the call is none
  std::vector<void*> memory() const;                           // for temporaries
  void or_stop(const std::function<void()>& work);

  Member& member_;
  const ProgramTable& program_;
  bool measures_;
  void* instance_ = nullptr;
  std::vector<Tensor> inputs_, outputs_;
  std::shared_ptr<const std::vector<Input>> shapes_;  // of the inputs; one object for all calls that are seen to have them
  std::optional<Progress> progress_;
  std::list<Seen> seen_;       // the last one first
  std::vector<void*> memory_;  // that their graphs use
  int64_t unseen_ = 0;
};

}  // namespace hw
