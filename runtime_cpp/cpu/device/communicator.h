// Communicators: the ranks of a process group, and where their collectives, sends and recvs meet.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "machine.h"
#include "match.h"
#include "nccl.h"
#include "op.h"
#include "shared.h"
#include "types.h"

namespace hostweave::cpu {

// The memory that all ranks of a process group have registered in one call.
struct Windows {
  std::vector<char*> bases;  // by rank
  std::size_t bytes = 0;
  int arrived = 0;
  std::vector<Mapping> mappings;  // of what other processes registered
};

struct ProcessGroup {
  explicit ProcessGroup(int size) : devices(size, -1), registered(size, 0), splits(size, 0), issued(size, 0) {}

  int size() const { return static_cast<int>(devices.size()); }

  // Whether all ranks have issued the same, so that a failure elsewhere leaves the process group as it was.
  bool in_step() const {
    if (shared) return shared->pending == 0;
    const auto met = [](const auto& entry) { return entry.second.sends.empty() && entry.second.recvs.empty(); };
    return arrived == size() && std::adjacent_find(issued.begin(), issued.end(), std::not_equal_to<>()) == issued.end() &&
           splits == std::vector<int>(splits.size(), splits.front()) && std::all_of(channels.begin(), channels.end(), met) &&
           std::all_of(signals.begin(), signals.end(), [](const auto& entry) { return entry.second->settled(); });
  }

  const char* name = "";
  std::shared_ptr<SharedGroup> shared;  // where the ranks are processes; the matches and counts here are for threads
  std::vector<int> devices;             // by rank; -1 until it has come
  int arrived = 0;
  bool stopped = false;  // by a failure: the ranks no longer agree on what was issued
  // Collectives match by how many each rank has issued before; sends and recvs by order for a pair of ranks.
  std::map<std::uint64_t, std::shared_ptr<Match>> collectives;
  struct Channel {
    std::deque<std::shared_ptr<Match>> sends, recvs;  // issued, and waiting for the other side
  };
  std::map<std::pair<int, int>, Channel> channels;  // (sender, receiver)
  struct Split {
    struct Wish {
      int color, key, rank;
      const char* name;
    };
    std::vector<Wish> requests;
    std::map<int, std::shared_ptr<ProcessGroup>> process_groups;
    std::map<int, int> new_ranks;  // old rank to new
    int left = 0;
  };
  std::map<int, Split> split_calls;
  std::map<std::tuple<int, int, int>, std::shared_ptr<SignalCount>> signals;  // by sender, receiver and number
  std::map<int, std::shared_ptr<Windows>> registrations;                      // that some rank has still to come to
  std::vector<int> registered;                                                // windows of each rank
  std::vector<int> splits;                                                    // split calls of each rank
  std::vector<std::uint64_t> issued;                                          // collectives of each rank
};

// The making of communicators, and groups of calls.
ncclResult_t check_usable(const std::string& call, ncclComm_t comm);  // known, and not stopped by a failure
void wait_for_ops(Lock& lock, ncclComm_t comm);                       // all that this rank has issued through it
bool in_group();
void wait_at_group_end(std::shared_ptr<ProcessGroup> process_group);
ncclResult_t wait_for_process_group(const ProcessGroup& process_group);  // until all its ranks have come
// The work of an op that waits for other processes.
std::function<void()> across_processes(std::shared_ptr<SharedGroup> shared, std::function<void(SharedGroup&)> work);

}  // namespace hostweave::cpu

struct ncclComm {
  std::shared_ptr<hostweave::cpu::ProcessGroup> process_group;
  int rank = 0;
  int device = 0;
  hostweave::cpu::OpPtr last;  // issued through it on this rank
};
