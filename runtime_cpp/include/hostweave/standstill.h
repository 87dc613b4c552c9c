// Position of a rank: its first unfinished call or graph launch, and the state of each stream.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace hw {

struct Standstill {
  using Line = std::pair<int, std::string>;  // number of the line in program.cpp, or 0; the call on that line
  // Dependency that the first unfinished op of a stream waits for.
  enum class Edge {
    none,         // the op runs, or its wait has ended
    event,        // an event that the line `from` of the same rank records
    call_before,  // an earlier call of this or another program
    signal,       // a signal of a peer
    credit,       // a peer has not consumed the previous signal
    transfer,     // a peer has not reached the send or recv
    collective,   // some ranks have not reached the collective
    unknown,      // an op of a graph, without a milestone (milestones.h)
  };
  struct Stream {
    std::string name;    // "caller", "ring[1]"
    Line done;           // the last finished line
    Line next;           // the first unfinished line
    int64_t behind = 0;  // number of unfinished ops after the first
    Edge edge = Edge::none;
    Line from;                        // line that records the event
    std::string from_stream;          // stream of that line
    std::string channel;              // "x"
    std::vector<int64_t> ranks = {};  // world ranks that may cause the wait
    int number = 0;                   // number of a signal
    int64_t nth = 0;                  // position among the call's collectives on this channel, from 1
  };
  int64_t call = 0;                   // number of the call or launch, from 1; 0: all are done
  bool is_graph = false;              // true for launches of graphs
  bool is_enqueuing = false;          // the host has not enqueued the whole call
  Line enqueued;                      // the last enqueued line
  std::vector<Stream> streams;        // streams with unfinished work
  std::vector<std::string> finished;  // streams without unfinished work
  // A channel, the ranks of its process group, and the number of collectives of the call that this rank has begun there.
  std::vector<std::tuple<std::string, std::vector<int64_t>, int64_t>> begun;
};

}  // namespace hw
