// Stream capture: calls on a stream become nodes of a graph, which a launch enqueues.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "machine.h"

namespace hostweave::cpu {

// Enqueues a node's op on a stream, and returns the status.
using Enqueue = std::function<int(Lock&, Stream&)>;

struct Node {
  std::size_t lane;  // index among the captured streams; 0 is the launch stream
  Enqueue enqueue;
  Place place;
  // Predecessors: the last node of its lane, and nodes of other lanes that the lane waits for.
  std::vector<std::size_t> after;
  std::vector<std::uint64_t*> marks = {};  // marks of the op
};

// An active or finished capture.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  const HostThread* thread;      // thread that began it
  std::vector<Stream*> streams;  // by lane
  std::vector<Node> nodes;
  std::map<std::size_t, std::size_t> last;  // last node of each lane
  bool invalid = false;
  bool over = false;
};

// Adds a node if the stream is being captured. Returns nullopt otherwise; enqueue as usual then.
std::optional<cudaError_t> add_node(Stream& stream, Enqueue enqueue);

// Increments `word` when the op is done. Increments it now if the op is already done.
void mark_op(Op& op, std::uint64_t* word);

// The same for cudaEventRecord and cudaStreamWaitEvent, whose nodes define dependencies.
std::optional<cudaError_t> capture_record(Event& event, Stream& stream, bool external);
std::optional<cudaError_t> capture_wait(Stream& stream, Event& event, bool external);

// For calls that are forbidden during capture in the calling thread's mode: returns the error and invalidates the capture.
std::optional<cudaError_t> forbidden_in_capture(const char* call);
// The same for calls that query or wait for this stream.
std::optional<cudaError_t> forbidden_in_capture(const char* call, const Stream& stream);

}  // namespace hostweave::cpu

struct CUgraph_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::size_t lanes;
};

struct CUgraphExec_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::vector<hostweave::cpu::Stream*> lanes;  // internal streams; none for lane 0
  hostweave::cpu::OpPtr last;                  // end of the last launch; launches of a graph do not overlap
};
