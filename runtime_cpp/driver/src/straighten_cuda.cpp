#include <algorithm>
#include <cstdint>
#include <exception>
#include <unordered_map>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/launch.h"
#include "hostweave/straighten.h"

namespace hw {

__global__ void fill_bytes(unsigned char* to, int64_t bytes, uint32_t value);

namespace {

constexpr int kFirstWithKindsOfEdges = 12030;  // first driver version with kinds of edges

#if CUDART_VERSION >= 13000
constexpr auto get_edges = cudaGraphGetEdges;
constexpr auto add_edges = cudaGraphAddDependencies;
constexpr auto remove_edges = cudaGraphRemoveDependencies;
constexpr auto get_capture = cudaStreamGetCaptureInfo;
#else
constexpr auto get_edges = cudaGraphGetEdges_v2;
constexpr auto add_edges = cudaGraphAddDependencies_v2;
constexpr auto remove_edges = cudaGraphRemoveDependencies_v2;
constexpr auto get_capture = cudaStreamGetCaptureInfo_v3;
#endif

std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  size_t count = 0;
  HW_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  HW_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

// Edges in CUDA's representation.
struct CudaEdges {
  std::vector<cudaGraphNode_t> from, to;
  std::vector<cudaGraphEdgeData> data;
};

CudaEdges edges_of(cudaGraph_t graph) {
  size_t count = 0;
  HW_CHECK(get_edges(graph, nullptr, nullptr, nullptr, &count));
  CudaEdges edges{std::vector<cudaGraphNode_t>(count), std::vector<cudaGraphNode_t>(count),
                  std::vector<cudaGraphEdgeData>(count)};
  HW_CHECK(get_edges(graph, edges.from.data(), edges.to.data(), edges.data.data(), &count));
  return edges;
}

Edge::Kind kind_of(const cudaGraphEdgeData& data) {
  if (data.from_port == cudaGraphKernelNodePortDefault && data.type == cudaGraphDependencyTypeDefault) return Edge::full;
  return data.from_port == cudaGraphKernelNodePortProgrammatic ? Edge::programmatic : Edge::other;
}

// Repeats a value of 1, 2 or 4 bytes to fill 4 bytes.
uint32_t repeated(uint32_t value, unsigned element_size) {
  if (element_size == 1) return (value & 0xff) * 0x01010101;
  return element_size == 2 ? (value & 0xffff) * 0x00010001 : value;
}

// Adds a kernel node, without edges, to replace a memset node. Returns null for a 2-D memset with gaps.
cudaGraphNode_t kernel_for(cudaGraphNode_t memset, cudaGraph_t graph, cudaStream_t idle) {
  cudaMemsetParams p;
  HW_CHECK(cudaGraphMemsetNodeGetParams(memset, &p));
  const size_t row = p.width * p.elementSize;
  if (p.height != 1 && p.pitch != row) return nullptr;
  const auto bytes = static_cast<int64_t>(row * p.height);
  HW_CHECK(cudaStreamBeginCaptureToGraph(idle, graph, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
  HW_CHECK(launch(fill_bytes, grid_of_elements<16>(bytes), idle, static_cast<unsigned char*>(p.dst), bytes,
                  repeated(p.value, p.elementSize)));
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
  HW_CHECK(get_capture(idle, &status, nullptr, nullptr, &last, nullptr, &count));
  const cudaGraphNode_t kernel = count == 1 ? *last : nullptr;
  HW_CHECK(cudaStreamEndCapture(idle, &graph));
  return kernel;
}

class Straightening {
 public:
  explicit Straightening(cudaGraph_t graph) : graph_(graph), nodes_(nodes_of(graph)), left_out_(nodes_.size()), now_(nodes_) {}

  void leave_out_events() {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      cudaEvent_t event = nullptr;
      if (is(i, cudaGraphNodeTypeWaitEvent)) {
        HW_CHECK(cudaGraphEventWaitNodeGetEvent(nodes_[i], &event));
        add(event, events_.awaited);
      } else if (is(i, cudaGraphNodeTypeEventRecord)) {
        HW_CHECK(cudaGraphEventRecordNodeGetEvent(nodes_[i], &event));
        add(event, events_.recorded);
      }
      left_out_[i] = event || is(i, cudaGraphNodeTypeEmpty);
    }
  }

  void replace_memsets(cudaStream_t idle) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (!is(i, cudaGraphNodeTypeMemset)) continue;
      if (const cudaGraphNode_t kernel = kernel_for(nodes_[i], graph_, idle)) now_[i] = kernel;
    }
  }

  // Replaces the edges of the graph. A needed edge stays unchanged if neither of its nodes was replaced.
  void lay_edges() {
    const CudaEdges given = edges_of(graph_);
    std::vector<bool> stays(given.data.size());
    std::vector<Edge> added;
    for (const Edge& edge : straightened(numbered(given), left_out_)) {
      const bool is_old = edge.given && now_[edge.from] == nodes_[edge.from] && now_[edge.to] == nodes_[edge.to];
      if (is_old)
        stays[*edge.given] = true;
      else
        added.push_back(edge);
    }
    for (size_t i = 0; i < stays.size(); ++i) {
      if (!stays[i]) HW_CHECK(remove_edges(graph_, &given.from[i], &given.to[i], &given.data[i], 1));
    }
    for (const Edge& edge : added) HW_CHECK(add_edges(graph_, &now_[edge.from], &now_[edge.to], nullptr, 1));
  }

  void destroy_what_is_left_out() {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (left_out_[i] || now_[i] != nodes_[i]) HW_CHECK(cudaGraphDestroyNode(nodes_[i]));
    }
  }

  const LaunchEvents& events() const { return events_; }

 private:
  // The runtime API returns an error instead of a type for nodes of stream memory operations.
  bool is(size_t node, cudaGraphNodeType wanted) const {
    cudaGraphNodeType type;
    if (cudaGraphNodeGetType(nodes_[node], &type) == cudaSuccess) return type == wanted;
    cudaGetLastError();
    return false;
  }

  // Adds an event only once. The edges of the graph already order the nodes that use the event.
  static void add(cudaEvent_t event, std::vector<cudaEvent_t>& events) {
    if (std::ranges::find(events, event) == events.end()) events.push_back(event);
  }

  std::vector<Edge> numbered(const CudaEdges& edges) const {
    std::unordered_map<cudaGraphNode_t, size_t> numbers;
    for (size_t i = 0; i < nodes_.size(); ++i) numbers[nodes_[i]] = i;
    std::vector<Edge> result;
    for (size_t i = 0; i < edges.data.size(); ++i)
      result.push_back({numbers.at(edges.from[i]), numbers.at(edges.to[i]), kind_of(edges.data[i]), i});
    return result;
  }

  cudaGraph_t graph_;
  std::vector<cudaGraphNode_t> nodes_;
  std::vector<bool> left_out_;
  std::vector<cudaGraphNode_t> now_;  // each node, or the kernel that replaces it
  LaunchEvents events_;
};

}  // namespace

void prepare_to_straighten() { HW_CHECK(load(fill_bytes)); }

// NCCL's nodes wait for events and record events. The events order the graph with NCCL calls outside of graphs. So each launch
// must wait for the events before the graph, and record the events after the graph.
LaunchEvents straighten(cudaGraph_t& graph, cudaStream_t idle) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) || driver < kFirstWithKindsOfEdges) return {};
  cudaGraph_t clone = nullptr;
  try {
    HW_CHECK(cudaGraphClone(&clone, graph));
    Straightening straightening(clone);
    straightening.leave_out_events();
    straightening.replace_memsets(idle);
    straightening.lay_edges();
    straightening.destroy_what_is_left_out();
    LaunchEvents events = straightening.events();
    cudaGraphDestroy(std::exchange(graph, clone));
    return events;
  } catch (const std::exception&) {
    cudaGetLastError();
    if (clone) cudaGraphDestroy(clone);
    return {};
  }
}

}  // namespace hw
