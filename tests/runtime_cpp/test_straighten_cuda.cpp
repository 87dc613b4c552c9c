// Nodes of unknown type are kept. The graph is straightened before and after them, or does not change if this is impossible.
#include <cstdio>
#include <set>
#include <string>

#include "hostweave/straighten.h"

#define EXPECT(condition) ((condition) ? void() : (std::printf("line %d: %s\n", __LINE__, #condition), void(++failures)))

namespace hw {
void fill_bytes(unsigned char*, int64_t, uint32_t) {}
}  // namespace hw

namespace {

int failures = 0;

cudaEvent_t event(size_t number) { return reinterpret_cast<cudaEvent_t>(number + 1); }

// A chain of a kernel, a wait for an event, a node of some type, a record of an event, and a memset.
cudaGraph_t row_with(cudaGraphNodeType type) {
  auto* graph =
      new Graph{{new Node{cudaGraphNodeTypeKernel, 0}, new Node{cudaGraphNodeTypeWaitEvent, 1, event(0)}, new Node{type, 2},
                 new Node{cudaGraphNodeTypeEventRecord, 3, event(1)}, new Node{cudaGraphNodeTypeMemset, 4}},
                {}};
  for (size_t i = 0; i + 1 < graph->nodes.size(); ++i) graph->edges.push_back({graph->nodes[i], graph->nodes[i + 1], {}});
  return graph;
}

std::set<std::pair<int, int>> edges_of(cudaGraph_t graph) {
  std::set<std::pair<int, int>> edges;
  for (const FakeEdge& edge : graph->edges) edges.insert({edge.from->name, edge.to->name});
  return edges;
}

void a_node_of_unknown_kind_stays_in_its_row() {
  Stream idle;
  cudaGraph_t graph = row_with(kUnknown);
  const hw::LaunchEvents events = hw::straighten(graph, &idle);
  EXPECT((edges_of(graph) == std::set<std::pair<int, int>>{{0, 2}, {2, 100}}));  // 100 is the kernel that replaces the memset.
  EXPECT(events.awaited == std::vector{event(0)} && events.recorded == std::vector{event(1)});
  EXPECT(cudaGetLastError() == cudaSuccess);
  cudaGraphDestroy(graph);
}

void nodes_of_known_kinds_are_treated_alike() {
  Stream idle;
  cudaGraph_t graph = row_with(cudaGraphNodeTypeKernel);
  hw::straighten(graph, &idle);
  EXPECT((edges_of(graph) == std::set<std::pair<int, int>>{{0, 2}, {2, 100}}));
  cudaGraphDestroy(graph);
}

void a_graph_that_cannot_be_straightened_stays_as_it_is() {
  Stream idle;
  cudaGraph_t graph = row_with(kUnknown);
  const cudaGraph_t given = graph;
  const auto edges = edges_of(graph);
  refuses_to_remove_edges = true;
  const hw::LaunchEvents events = hw::straighten(graph, &idle);
  refuses_to_remove_edges = false;
  EXPECT(graph == given && edges_of(graph) == edges);
  EXPECT(events.awaited.empty() && events.recorded.empty());
  EXPECT(cudaGetLastError() == cudaSuccess);
  cudaGraphDestroy(graph);
}

void an_old_driver_has_no_kinds_of_edges() {
  Stream idle;
  cudaGraph_t graph = row_with(kUnknown);
  const auto edges = edges_of(graph);
  driver_version = 12020;
  hw::straighten(graph, &idle);
  driver_version = 13000;
  EXPECT(edges_of(graph) == edges);
  cudaGraphDestroy(graph);
}

}  // namespace

int main() {
  a_node_of_unknown_kind_stays_in_its_row();
  nodes_of_known_kinds_are_treated_alike();
  a_graph_that_cannot_be_straightened_stays_as_it_is();
  an_old_driver_has_no_kinds_of_edges();
  return failures;
}
