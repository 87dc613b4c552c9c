#include "hostweave/straighten.h"

#include <algorithm>
#include <cstdint>
#include <valarray>

namespace hw {
namespace {

class Nodes {
 public:
  explicit Nodes(size_t nodes) : words_(uint64_t{0}, nodes / 64 + 1) {}

  void add(size_t node) { words_[node / 64] |= uint64_t{1} << node % 64; }
  void add(const Nodes& others) { words_ |= others.words_; }
  bool has(size_t node) const { return words_[node / 64] >> node % 64 & 1; }

 private:
  std::valarray<uint64_t> words_;
};

std::vector<std::vector<Edge>> edges_to(const std::vector<Edge>& edges, size_t nodes) {
  std::vector<std::vector<Edge>> result(nodes);
  for (const Edge& edge : edges) result[edge.to].push_back(edge);
  return result;
}

std::vector<size_t> topological_order(const std::vector<Edge>& edges, size_t nodes) {
  std::vector<std::vector<size_t>> then(nodes);
  std::vector<size_t> open(nodes), order;
  for (const Edge& edge : edges) {
    then[edge.from].push_back(edge.to);
    ++open[edge.to];
  }
  for (size_t node = 0; node < nodes; ++node) {
    if (open[node] == 0) order.push_back(node);
  }
  for (size_t i = 0; i < order.size(); ++i) {
    for (const size_t next : then[order[i]]) {
      if (--open[next] == 0) order.push_back(next);
    }
  }
  return order;
}

// Removes a node, and connects its predecessors to its successors. The new edges are full; they replace edges between the same
// nodes.
void leave_out(size_t node, std::vector<Edge>& edges) {
  const auto gone = std::ranges::partition(edges, [&](const Edge& edge) { return edge.from != node && edge.to != node; });
  const std::vector<Edge> of_node(gone.begin(), gone.end());
  edges.erase(gone.begin(), gone.end());
  for (const Edge& before : of_node) {
    for (const Edge& behind : of_node) {
      if (before.to != node || behind.from != node) continue;
      std::erase_if(edges, [&](const Edge& edge) { return edge.from == before.from && edge.to == behind.to; });
      edges.push_back({before.from, behind.to});
    }
  }
}

// For each node: the nodes that have ended when the node starts, and when the node ends.
class Ended {
 public:
  Ended(const std::vector<Edge>& edges, size_t nodes) : begins_(nodes, Nodes(nodes)), ends_(begins_) {
    const auto edges_to_node = edges_to(edges, nodes);
    for (const size_t node : topological_order(edges, nodes)) {
      for (const Edge& edge : edges_to_node[node]) {
        begins_[node].add(begins_[edge.from]);
        if (edge.kind == Edge::full) add(edge.from, begins_[node]);
        if (edge.kind != Edge::other) add(edge.from, ends_[node]);
      }
      ends_[node].add(begins_[node]);
    }
  }

  // True if the edge `before` makes any edge from `node` to the same target redundant, even a full one.
  bool has(size_t node, const Edge& before) const {
    return begins_[before.from].has(node) || (before.kind == Edge::full && ends_[before.from].has(node));
  }

 private:
  void add(size_t node, Nodes& to) const {
    to.add(node);
    to.add(ends_[node]);
  }

  std::vector<Nodes> begins_, ends_;
};

}  // namespace

std::vector<Edge> straightened(std::vector<Edge> edges, const std::vector<bool>& left_out) {
  const size_t nodes = left_out.size();
  for (size_t node = 0; node < nodes; ++node) {
    if (left_out[node]) leave_out(node, edges);
  }
  const Ended ended(edges, nodes);
  const auto edges_to_node = edges_to(edges, nodes);
  std::erase_if(edges, [&](const Edge& edge) {
    return std::ranges::any_of(edges_to_node[edge.to], [&](const Edge& before) { return ended.has(edge.from, before); });
  });
  return edges;
}

}  // namespace hw
