// State of a rank's streams in an unfinished call.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace hw {

struct Standstill {
  struct Line {
    int number = 0;  // in program.cpp; 0: none
    std::string call;
  };
  // Kind of edge that the first unfinished op waits for.
  enum class Edge : int {
    none,         // it runs, or what it waits for is there
    event,        // of `from`, a line of the same rank
    call_before,  // of this program or another one
    signal,       // of a peer
    credit,       // a peer has not taken the signal before
    transfer,     // a send or a recv: of the peers
    collective,   // of all ranks of the process group
    unknown,      // an op of a graph, whose streams write no milestones
  };
  struct Stream {
    std::string name;  // "caller", "ring[1]"
    Line done;         // the last one
    Line next;         // the first that is not done
    int64_t behind = 0;
    Edge edge = Edge::none;
    Line from;                        // of an event
    std::string from_stream;          // likewise
    std::string channel;              // "x"
    std::vector<int64_t> ranks = {};  // that may owe it: numbers of the world
    int number = 0;                   // of a signal
    int64_t nth = 0;                  // of the collectives of the call on this channel, from 1
  };
  // How many collectives of the call the rank has begun on a channel.
  struct Begun {
    std::string channel;
    std::vector<int64_t> ranks;
    int64_t count = 0;
  };
  int64_t call = 0;                   // its number, from 1; 0: all calls are done
  bool is_graph = false;              // it is the launch of a graph
  bool is_enqueuing = false;          // the host has not enqueued all of it
  Line enqueued;                      // the last line that it has enqueued
  std::vector<Stream> streams;        // those with something left to do
  std::vector<std::string> finished;  // streams with nothing left to do
  std::vector<Begun> begun;
};

const char* name_of(Standstill::Edge edge);

}  // namespace hw
