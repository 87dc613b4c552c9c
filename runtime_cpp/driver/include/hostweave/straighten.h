// Optimises captured graphs for launch time. A chain of kernels launches nearly as fast as one kernel. Each fork, each join and
// each node that is not a kernel costs host time.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace hw {

// An edge of a graph: node `to` waits for node `from`.
struct Edge {
  enum Kind {
    full,          // `to` starts after the end of `from`
    programmatic,  // programmatic dependent launch
    other,         // `to` starts after the start of `from`
  };
  size_t from, to;
  Kind kind = full;
  std::optional<size_t> given{};  // index among the captured edges
};

// Removes the nodes of `left_out`, connects their predecessors to their successors, and removes edges that would be redundant
// even if they were full.
std::vector<Edge> straightened(std::vector<Edge> edges, const std::vector<bool>& left_out);

// Events that a stream waits for before a launch of the graph, and events that the stream records after the launch.
struct LaunchEvents {
  std::vector<cudaEvent_t> awaited, recorded;
};

// Loads the kernel of `straighten` on the current device.
void prepare_to_straighten();
// Replaces a captured graph by an optimised graph. Each launch of the optimised graph must wait for and record the returned
// events. Leaves the graph unchanged if it cannot be optimised. `idle` is an idle stream for a capture.
LaunchEvents straighten(cudaGraph_t& graph, cudaStream_t idle);

}  // namespace hw
