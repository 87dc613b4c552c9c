// A straightened graph keeps the order of its nodes.
#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "hostweave/straighten.h"
#include "testing.h"

namespace {

using hw::Edge;
using Pairs = std::set<std::pair<size_t, size_t>>;

Pairs pairs_of(const std::vector<Edge>& edges) {
  Pairs pairs;
  for (const Edge& edge : edges) pairs.insert({edge.from, edge.to});
  return pairs;
}

// Order of the starts and ends of nodes, as implied by the edges.
using Moment = std::pair<size_t, bool>;  // a node, and true for its end
std::set<std::pair<Moment, Moment>> order_of(const std::vector<Edge>& edges, const std::vector<bool>& left_out) {
  const size_t nodes = left_out.size();
  std::vector<std::vector<bool>> before(2 * nodes, std::vector<bool>(2 * nodes));
  for (size_t i = 0; i < nodes; ++i) before[2 * i][2 * i + 1] = true;
  for (const Edge& edge : edges) {
    before[2 * edge.from][2 * edge.to] = true;
    if (edge.kind == Edge::full) before[2 * edge.from + 1][2 * edge.to] = true;
    if (edge.kind == Edge::programmatic) before[2 * edge.from + 1][2 * edge.to + 1] = true;
  }
  for (size_t k = 0; k < 2 * nodes; ++k) {
    for (size_t i = 0; i < 2 * nodes; ++i) {
      for (size_t j = 0; j < 2 * nodes; ++j) before[i][j] = before[i][j] || (before[i][k] && before[k][j]);
    }
  }
  std::set<std::pair<Moment, Moment>> result;
  for (size_t i = 0; i < 2 * nodes; ++i) {
    for (size_t j = 0; j < 2 * nodes; ++j) {
      if (before[i][j] && !left_out[i / 2] && !left_out[j / 2]) result.insert({{i / 2, i % 2}, {j / 2, j % 2}});
    }
  }
  return result;
}

}  // namespace

TEST(communications_of_a_row_of_kernels_are_in_the_row) {
  // A graph with kernels 0, 2, 5 and 8, and with communications 3 and 6. The other nodes are events: each communication
  // waits for one, and is followed by another.
  enum { wait = 1, record = 4, wait_again = 7, record_again = 9 };
  const std::vector<Edge> edges{{0, 2, Edge::programmatic},
                                {2, 3},
                                {wait, 3},
                                {3, record},
                                {3, 5, Edge::programmatic},
                                {5, 6},
                                {record, wait_again},
                                {wait_again, 6},
                                {6, record_again},
                                {6, 8},
                                {record, 8}};
  std::vector<bool> events(10);
  for (const int node : {wait, record, wait_again, record_again}) events[node] = true;
  EXPECT(pairs_of(hw::straightened(edges, events)) == (Pairs{{0, 2}, {2, 3}, {3, 5}, {5, 6}, {6, 8}}));
}

TEST(an_edge_that_lets_begin_does_not_imply_one_that_waits_for_the_end) {
  const std::vector<Edge> begins{{0, 1, Edge::programmatic}, {1, 2, Edge::programmatic}, {0, 2}};
  EXPECT(pairs_of(hw::straightened(begins, std::vector<bool>(3))) == pairs_of(begins));
  const std::vector<Edge> ends{{0, 1, Edge::programmatic}, {1, 2}, {0, 2}};
  EXPECT(pairs_of(hw::straightened(ends, std::vector<bool>(3))) == (Pairs{{0, 1}, {1, 2}}));
  const std::vector<Edge> begun{{0, 1, Edge::other}, {1, 2}, {0, 2}};
  EXPECT(pairs_of(hw::straightened(begun, std::vector<bool>(3))) == pairs_of(begun));
}

TEST(the_order_of_random_graphs_stays) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t nodes = 2 + random() % 11;
    std::vector<size_t> number(nodes);  // The numbers of nodes are not in the order of the edges.
    for (size_t i = 0; i < nodes; ++i) number[i] = i;
    std::ranges::shuffle(number, random);
    std::vector<bool> left_out(nodes);
    for (size_t i = 0; i < nodes; ++i) left_out[i] = random() % 4 == 0;
    std::vector<Edge> edges;
    for (size_t i = 0; i < nodes; ++i) {
      for (size_t j = i + 1; j < nodes; ++j) {
        if (random() % 3 != 0) continue;
        const bool of_kernels = !left_out[number[i]] && !left_out[number[j]];
        edges.push_back({number[i], number[j], of_kernels ? static_cast<Edge::Kind>(random() % 3) : Edge::full, edges.size()});
      }
    }
    const std::vector<Edge> straight = hw::straightened(edges, left_out);
    const auto order = order_of(edges, left_out);
    EXPECT(order_of(straight, left_out) == order);
    for (size_t i = 0; i < straight.size(); ++i) {
      const Edge& edge = straight[i];
      EXPECT(!left_out[edge.from] && !left_out[edge.to]);
      if (edge.given) EXPECT(edges[*edge.given].from == edge.from && edges[*edge.given].kind == edge.kind);
      std::vector<Edge> without = straight;
      without.erase(without.begin() + i);
      if (edge.kind == Edge::full) EXPECT(order_of(without, left_out) != order);  // No full edge is redundant.
    }
  }
}
