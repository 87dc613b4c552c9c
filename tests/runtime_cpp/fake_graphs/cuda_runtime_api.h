// Fake of the CUDA runtime functions that straighten_cuda.cpp uses. Its graphs are plain data. cudaGraphNodeGetType
// fails for nodes of unknown kind, as in CUDA for nodes of stream memory operations.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000
#define __global__

enum cudaError_t { cudaSuccess, cudaErrorUnknown };
enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel,
  cudaGraphNodeTypeMemset,
  cudaGraphNodeTypeEmpty,
  cudaGraphNodeTypeWaitEvent,
  cudaGraphNodeTypeEventRecord,
  kUnknown,
};
enum { cudaGraphKernelNodePortDefault, cudaGraphKernelNodePortProgrammatic };
enum { cudaGraphDependencyTypeDefault };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusActive };

struct cudaGraphEdgeData {
  int from_port = 0, type = 0;
};
struct cudaMemsetParams {
  void* dst;
  size_t pitch, width, height;
  unsigned value, elementSize;
};
using cudaEvent_t = struct Event*;
struct Node {
  cudaGraphNodeType type;
  int name = 0;  // The name is the same in a clone.
  cudaEvent_t event = nullptr;
};
using cudaGraphNode_t = Node*;
struct FakeEdge {
  Node *from, *to;
  cudaGraphEdgeData data;
};
struct Graph {
  std::vector<Node*> nodes;
  std::vector<FakeEdge> edges;
};
using cudaGraph_t = Graph*;
struct Stream {
  Graph* captures = nullptr;
  Node* last = nullptr;
};
using cudaStream_t = Stream*;

inline cudaError_t last_error = cudaSuccess;
inline cudaError_t error() { return last_error = cudaErrorUnknown; }
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
inline int driver_version = 13000;
inline bool refuses_to_remove_edges = false;
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version;
  return cudaSuccess;
}

inline cudaError_t cudaGraphClone(cudaGraph_t* clone, cudaGraph_t graph) {
  *clone = new Graph;
  for (Node* node : graph->nodes) (*clone)->nodes.push_back(new Node(*node));
  const auto cloned = [&](Node* node) { return (*clone)->nodes[std::ranges::find(graph->nodes, node) - graph->nodes.begin()]; };
  for (const FakeEdge& edge : graph->edges) (*clone)->edges.push_back({cloned(edge.from), cloned(edge.to), edge.data});
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  for (Node* node : graph->nodes) delete node;
  delete graph;
  return cudaSuccess;
}
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  *count = graph->nodes.size();
  if (nodes) std::ranges::copy(graph->nodes, nodes);
  return cudaSuccess;
}
inline cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  if (node->type == kUnknown) return error();
  *type = node->type;
  return cudaSuccess;
}
inline cudaError_t cudaGraphGetEdges(cudaGraph_t graph, Node** from, Node** to, cudaGraphEdgeData* data, size_t* count) {
  *count = graph->edges.size();
  for (size_t i = 0; from && i < *count; ++i) {
    from[i] = graph->edges[i].from;
    to[i] = graph->edges[i].to;
    data[i] = graph->edges[i].data;
  }
  return cudaSuccess;
}
inline cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, Node* const* from, Node* const* to, const cudaGraphEdgeData* data,
                                            size_t count) {
  for (size_t i = 0; i < count; ++i) graph->edges.push_back({from[i], to[i], data ? data[i] : cudaGraphEdgeData{}});
  return cudaSuccess;
}
inline cudaError_t cudaGraphRemoveDependencies(cudaGraph_t graph, Node* const* from, Node* const* to, const cudaGraphEdgeData*,
                                               size_t) {
  const auto is_edge = [&](const FakeEdge& edge) { return edge.from == *from && edge.to == *to; };
  return !refuses_to_remove_edges && std::erase_if(graph->edges, is_edge) ? cudaSuccess : error();
}
inline cudaError_t cudaGraphDestroyNode(cudaGraphNode_t) { return cudaSuccess; }
inline cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t, cudaMemsetParams* params) {
  static char bytes[8];
  *params = {bytes, 0, 8, 1, 0, 1};
  return cudaSuccess;
}
inline cudaError_t event_of(Node* node, cudaEvent_t* event) {
  *event = node->event;
  return cudaSuccess;
}
inline cudaError_t cudaGraphEventWaitNodeGetEvent(Node* node, cudaEvent_t* event) { return event_of(node, event); }
inline cudaError_t cudaGraphEventRecordNodeGetEvent(Node* node, cudaEvent_t* event) { return event_of(node, event); }
inline cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, Node* const*, const cudaGraphEdgeData*,
                                                 size_t, cudaStreamCaptureMode) {
  stream->captures = graph;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus*, unsigned long long*, cudaGraph_t*,
                                            Node* const** last, const cudaGraphEdgeData**, size_t* count) {
  *last = &stream->last;
  *count = stream->last ? 1 : 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t*) {
  *stream = {};
  return cudaSuccess;
}
