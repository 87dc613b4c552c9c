// Stream capture: calls on a stream become nodes of a graph. A launch enqueues the nodes.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "machine.h"

namespace hostweave::cpu {

// Enqueues the op of a node on a stream. Returns 0 on success.
using Enqueue = std::function<int(Lock&, Stream&)>;

struct Node {
  std::size_t stream;  // index among the captured streams; 0 is the launch stream
  Enqueue enqueue;
  Location location;
  // Predecessors: the previous node of the stream, and the node of the event if this node waits for a captured event.
  std::vector<std::size_t> after;
  std::vector<std::uint64_t*> marks = {};  // words to increment when the op is done
};

// An active or finished capture.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  const HostThread* thread;      // thread that began the capture
  std::vector<Stream*> streams;  // by index
  std::vector<Node> nodes;
  std::map<std::size_t, std::size_t> last;  // last node of each stream
  bool invalid = false;
  bool over = false;
};

// Adds a node to the capture of a stream. Returns nullopt if the stream is not being captured.
std::optional<cudaError_t> add_node(Stream& stream, Enqueue enqueue);

// Increments `word` when the op is done, or at once if the op is already done.
void mark_op(Op& op, std::uint64_t* word);

// Like add_node, for cudaEventRecord and cudaStreamWaitEvent. Unless `external`, a stream
// that waits for a captured event joins the capture.
std::optional<cudaError_t> capture_record(Event& event, Stream& stream, bool external);
std::optional<cudaError_t> capture_wait(Stream& stream, Event& event, bool external);

// Returns an error and invalidates a capture if the modes of the capture and of the calling thread forbid `call`.
std::optional<cudaError_t> forbidden_in_capture(const char* call);
// Returns an error and invalidates the capture if this stream is captured.
std::optional<cudaError_t> forbidden_in_capture(const char* call, const Stream& stream);

}  // namespace hostweave::cpu

struct CUgraph_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::size_t streams;
};

struct CUgraphExec_st {
  std::vector<hostweave::cpu::Node> nodes;
  std::vector<hostweave::cpu::Stream*> internal_streams;  // internal streams by index; null for index 0, the launch stream
  hostweave::cpu::OpPtr last;                             // end of the last launch; launches of a graph do not overlap
};
