// Stream capture: what a stream would enqueue becomes nodes of a graph, which a launch enqueues.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "machine.h"

namespace hostweave::cpu {

// Puts it on a stream. The status of what it calls.
using Enqueue = std::function<int(Lock&, Stream&)>;

struct Node {
  std::size_t lane;  // of the streams that were captured; 0 is the one that the graph is launched on
  Enqueue enqueue;
  Place place;
  // Nodes before it: the last one of its lane, and those of other lanes that it waits for where it enqueues nothing itself.
  std::vector<std::size_t> after;
};

// A capture that is going on, or is over.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  const HostThread* thread;      // that began it
  std::vector<Stream*> streams;  // by lane
  std::vector<Node> nodes;
  std::map<std::size_t, std::size_t> last;  // node of each lane
  bool invalid = false;
  bool over = false;
};

// Adds a node where the stream is being captured. Null: it is not, so enqueue as usual.
std::optional<cudaError_t> add_node(Stream& stream, Enqueue enqueue);

// The same for cudaEventRecord and cudaStreamWaitEvent, whose nodes say what waits for what.
std::optional<cudaError_t> capture_record(Event& event, Stream& stream, bool external);
std::optional<cudaError_t> capture_wait(Stream& stream, Event& event, bool external);

// For calls that may not be made while something is captured, as the calling thread's mode has it: the error, after which the
// capture is of no use.
std::optional<cudaError_t> forbidden_in_capture(const char* call);
// For calls that ask or wait for this stream.
std::optional<cudaError_t> forbidden_in_capture(const char* call, const Stream& stream);

}  // namespace hostweave::cpu

struct CUgraph_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::size_t lanes;
};

struct CUgraphExec_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::vector<hostweave::cpu::Stream*> lanes;  // of its own; none for lane 0
  hostweave::cpu::OpPtr last;                  // of the last launch: a graph runs once at a time
};
