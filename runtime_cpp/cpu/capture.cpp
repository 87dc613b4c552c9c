#include "capture.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "errors.h"

using namespace hostweave::cpu;

namespace hostweave::cpu {
namespace {

cudaError_t invalidated(Capture& capture, cudaError_t code, const std::string& text) {
  capture.invalid = true;
  return error(code, text);
}

int is_destroyed(Event* event, const char* does) {
  if (Machine::get().events.count(event) != 0) return cudaSuccess;
  return error(cudaErrorInvalidResourceHandle, std::string("a graph ") + does + " an event that was destroyed");
}

void join(const std::shared_ptr<Capture>& capture, Stream& stream) {
  stream.capture = capture;
  stream.index_in_capture = capture->streams.size();
  capture->streams.push_back(&stream);
}

// True if all captured work precedes the end of the first stream.
bool is_joined(const Capture& capture) {
  const auto end = capture.last.find(0);
  std::vector<bool> before(capture.nodes.size());
  if (end != capture.last.end()) before[end->second] = true;
  for (std::size_t node = before.size(); node-- > 0;) {
    for (const std::size_t earlier : capture.nodes[node].after) before[earlier] = before[earlier] || before[node];
  }
  return std::ranges::count(before, false) == 0;
}

cudaError_t launch_node(Lock& lock, const Node& node, Stream& on, const std::vector<OpPtr>& launched) {
  HostThread& thread = this_thread();
  const Location location = std::exchange(thread.location, node.location);
  int status = 0;
  if (node.enqueue) {
    status = node.enqueue(lock, on);
  } else {
    OpPtr op = new_op("wait", 1);
    for (const std::size_t before : node.after) op->after.push_back(launched[before]);
    Machine::get().enqueue(lock, std::move(op), on);
  }
  this_thread().location = location;
  if (Machine::get().failed()) return cuda_stopped();
  return status == 0 ? cudaSuccess : error(cudaErrorLaunchFailure, last_error_text());
}

// Returns the order in which a launch enqueues the nodes. In seeded mode, a launch enqueues all nodes in the
// launch stream with probability 1/2, in a random topological order.
std::vector<std::size_t> order_of_launch(const std::vector<Node>& nodes, bool& as_one_queue) {
  Machine& machine = Machine::get();
  std::vector<std::size_t> order(nodes.size());
  std::iota(order.begin(), order.end(), 0);
  as_one_queue = machine.seeded() && machine.picker->draw(2) == 0;
  if (!as_one_queue) return order;
  std::vector<std::vector<std::size_t>> then(nodes.size());
  std::vector<std::size_t> before(nodes.size(), 0), ready;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const std::size_t node : nodes[i].after) then[node].push_back(i);
    before[i] = nodes[i].after.size();
    if (before[i] == 0) ready.push_back(i);
  }
  order.clear();
  while (!ready.empty()) {
    std::swap(ready[machine.picker->draw(ready.size())], ready.back());
    const std::size_t node = ready.back();
    ready.pop_back();
    order.push_back(node);
    for (const std::size_t next : then[node]) {
      if (--before[next] == 0) ready.push_back(next);
    }
  }
  return order;
}

}  // namespace

std::optional<cudaError_t> add_node(Stream& stream, Enqueue enqueue) {
  if (!stream.capture) return std::nullopt;
  Capture& capture = *stream.capture;
  if (capture.invalid) return error(cudaErrorStreamCaptureInvalidated, "an earlier call has invalidated the capture");
  capture.nodes.push_back({stream.index_in_capture, std::move(enqueue), this_thread().location, {}});
  Node& node = capture.nodes.back();
  const auto [last, is_first] = capture.last.try_emplace(node.stream);
  if (!is_first) node.after.push_back(last->second);
  last->second = capture.nodes.size() - 1;
  return cudaSuccess;
}

std::optional<cudaError_t> forbidden_in_capture(const char* call) {
  const HostThread& me = this_thread();
  if (me.capture_mode == cudaStreamCaptureModeRelaxed) return std::nullopt;
  for (const std::shared_ptr<Capture>& capture : Machine::get().captures) {
    const bool mine = capture->thread == &me && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool of_all = capture->mode == cudaStreamCaptureModeGlobal && me.capture_mode == cudaStreamCaptureModeGlobal;
    if (mine || of_all)
      return invalidated(*capture, cudaErrorStreamCaptureUnsupported, std::string(call) + " while a stream is captured");
  }
  return std::nullopt;
}

std::optional<cudaError_t> forbidden_in_capture(const char* call, const Stream& stream) {
  if (!stream.capture) return std::nullopt;
  return invalidated(*stream.capture, cudaErrorStreamCaptureUnsupported, std::string(call) + " of a stream that is captured");
}

std::optional<cudaError_t> capture_record(Event& event, Stream& stream, bool external) {
  if (!stream.capture) {
    if (external) return error(cudaErrorInvalidValue, "cudaEventRecordExternal outside of a capture");
    event.capture.reset();
    return std::nullopt;
  }
  const auto record = [handle = &event](Lock& lock, Stream& on) {
    if (const int destroyed = is_destroyed(handle, "records")) return destroyed;
    handle->record = new_op("record", 0);
    Machine::get().enqueue(lock, handle->record, on);
    return 0;
  };
  if (external) return add_node(stream, record);
  const auto added = add_node(stream, [](Lock& lock, Stream& on) {
    Machine::get().enqueue(lock, new_op("record", 0), on);
    return 0;
  });
  event.capture = stream.capture;
  event.node = stream.capture->last[stream.index_in_capture];
  return added;
}

std::optional<cudaError_t> capture_wait(Stream& stream, Event& event, bool external) {
  if (external) {
    if (!stream.capture) return error(cudaErrorInvalidValue, "cudaEventWaitExternal outside of a capture");
    return add_node(stream, [handle = &event](Lock& lock, Stream& on) {
      if (const int destroyed = is_destroyed(handle, "waits for")) return destroyed;
      OpPtr op = new_op("wait", 1);
      if (handle->record) op->after.push_back(handle->record);
      Machine::get().enqueue(lock, std::move(op), on);
      return 0;
    });
  }
  if (!event.capture) {
    if (!stream.capture) return std::nullopt;
    return invalidated(*stream.capture, cudaErrorStreamCaptureIsolation,
                       "dependency created on uncaptured work in another stream");
  }
  if (event.capture->over) return error(cudaErrorCapturedEvent, "a wait for an event that was last recorded in a capture");
  if (stream.capture && stream.capture != event.capture)
    return invalidated(*stream.capture, cudaErrorStreamCaptureMerge, "a wait for an event of another capture");
  if (!stream.capture) join(event.capture, stream);
  if (const auto added = add_node(stream, nullptr); added && *added) return added;
  stream.capture->nodes.back().after.push_back(event.node);
  return cudaSuccess;
}

void mark_op(Op& op, std::uint64_t* word) {
  op.done ? static_cast<void>(std::atomic_ref(*word).fetch_add(1)) : op.marks.push_back(word);
}

}  // namespace hostweave::cpu

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long captures = 0;
  Call call;
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, "cudaStreamBeginCapture");
  if (stream->legacy()) return error(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture of the default stream");
  if (stream->capture) return error(cudaErrorIllegalState, "cudaStreamBeginCapture: the stream is captured already");
  const auto capture = std::make_shared<Capture>(Capture{++captures, mode, &this_thread(), {}, {}, {}});
  join(capture, *stream);
  Machine::get().captures.push_back(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Call call;
  *graph = nullptr;
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream || !stream->capture) return error(cudaErrorIllegalState, "cudaStreamEndCapture: the stream is not captured");
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->streams.front() != stream)
    return invalidated(*capture, cudaErrorStreamCaptureUnmatched,
                       "cudaStreamEndCapture: not the stream that the capture began on");
  capture->over = true;
  std::erase(Machine::get().captures, capture);
  for (Stream* one : capture->streams) one->capture.reset();
  if (capture->invalid) return error(cudaErrorStreamCaptureInvalidated, "an earlier call has invalidated the capture");
  if (!is_joined(*capture))
    return error(cudaErrorStreamCaptureUnjoined, "a stream of the capture was not joined to its first stream");
  *graph = new CUgraph_st{std::move(capture->nodes), capture->streams.size()};
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  Call call;
  const Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, "cudaStreamGetCaptureInfo");
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  if (id && stream->capture) *id = stream->capture->id;
  return cudaSuccess;
}
// CUDA 12 gives the function this name.
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t**, size_t*) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = std::exchange(this_thread().capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  Call call;
  *exec = new CUgraphExec_st{graph->nodes, {nullptr}, nullptr};
  for (std::size_t i = 1; i < graph->streams; ++i)
    (*exec)->internal_streams.push_back(Machine::get().create_stream(cudaStreamNonBlocking));
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

// The ops of a launch have the dependencies of the captured calls. The ops run after the previous launch of the graph.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  Call call;
  Machine& machine = Machine::get();
  if (machine.failed()) return cuda_stopped();
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, "cudaGraphLaunch");
  if (stream->capture) return cuda_not_supported("the launch of a graph in a capture");
  OpPtr begin = new_op("graph", -1);
  if (exec->last) begin->after.push_back(exec->last);
  machine.enqueue(call.lock, std::move(begin), *stream);
  std::vector<OpPtr> launched(exec->nodes.size());
  bool as_one_queue = false;
  for (const std::size_t i : order_of_launch(exec->nodes, as_one_queue)) {
    const Node& node = exec->nodes[i];
    Stream& on = node.stream == 0 || as_one_queue ? *stream : *exec->internal_streams[node.stream];
    if (const cudaError_t result = launch_node(call.lock, node, on, launched)) return result;
    launched[i] = on.last;
    for (std::uint64_t* mark : node.marks) mark_op(*on.last, mark);
  }
  exec->last = stream->last;
  return cudaSuccess;
}

cudaError_t hw_cpu_milestone(cudaStream_t handle, std::uint64_t* word) {
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, "hw_cpu_milestone");
  if (const auto& capture = stream->capture) {
    if (const auto last = capture->last.find(stream->index_in_capture); last != capture->last.end())
      capture->nodes[last->second].marks.push_back(word);
  } else if (stream->last) {
    mark_op(*stream->last, word);
  } else {
    std::atomic_ref(*word).fetch_add(1);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  Call call;
  for (Stream* stream : exec->internal_streams) {
    if (stream) Machine::get().destroy_stream(stream);
  }
  delete exec;
  return cudaSuccess;
}

}  // extern "C"
