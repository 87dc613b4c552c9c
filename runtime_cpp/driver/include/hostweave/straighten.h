// Graphs of captured calls as they are launched fastest. A row of kernels takes the host little more than one of them; forks,
// joins and nodes of other kinds take it time, each.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace hw {

// An edge of a graph: node `to` waits for node `from`.
struct Edge {
  enum Kind {
    full,          // `to` begins when `from` has ended
    programmatic,  // `to` begins when `from` lets it, and ends after it
    other,         // `to` begins when `from` has begun
  };
  size_t from, to;
  Kind kind = full;
  std::optional<size_t> given{};  // which one it is of those that a graph has already
};

// The edges of a graph without the nodes that are left out, where what was before one of those is before what was behind it; and
// without edges that the others imply.
std::vector<Edge> straightened(std::vector<Edge> edges, const std::vector<bool>& left_out);

// What a launch of a graph stands between, on the stream that it is launched on.
struct LaunchEvents {
  std::vector<cudaEvent_t> awaited, recorded;
};

// Loads what `straighten` needs on the current device, before any rank runs.
void prepare_to_straighten();
// Puts a straightened graph in the place of a captured one; its launches stand between these events then. Leaves a graph that
// it cannot straighten as it is. `idle` is for a capture.
LaunchEvents straighten(cudaGraph_t& graph, cudaStream_t idle);

}  // namespace hw
