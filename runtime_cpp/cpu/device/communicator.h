// Communicators: the ranks of a process group, and the matching of their collectives, sends and recvs.
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
#include "nccl.h"
#include "op.h"
#include "shared.h"
#include "types.h"

namespace hostweave::cpu {

enum class CommKind { all_gather, all_reduce, reduce_scatter, broadcast, reduce, send_recv };

// Properties that must be equal in all calls of a collective, or in a send and its recv.
struct Asked {
  CommKind kind = CommKind::send_recv;
  std::size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  int root = -1;  // only for broadcast and reduce

  std::size_t bytes() const { return count * type_size(type); }
  bool reduces() const { return kind == CommKind::all_reduce || kind == CommKind::reduce_scatter || kind == CommKind::reduce; }
  // True if the result at seat `to` depends on the input of seat `from`. Otherwise NCCL may end the call of `to` before the call
  // of `from` begins. A seat is an index in Match::seats.
  bool data_flows(int from, int to) const {
    if (kind == CommKind::send_recv) return from == 0 && to == 1;
    if (kind == CommKind::broadcast) return from == root;
    if (kind == CommKind::reduce) return to == root;
    return true;
  }
  // Byte offsets of the data for seat `to` in the send buffer, and of the data from seat `from` in the receive buffer.
  std::size_t sent_at(int to) const { return kind == CommKind::reduce_scatter ? to * bytes() : 0; }
  std::size_t received_at(int from) const { return kind == CommKind::all_gather ? from * bytes() : 0; }
};

// A collective, or a send with its recv. Each call has one seat.
struct Match : Asked {
  enum class State { open, running, done };
  struct Seat {
    Stream* stream = nullptr;  // set from issue to completion
    bool issued = false;
    const void* send = nullptr;
    void* recv = nullptr;
    bool begun = false;
    ClockSnapshot clock;
    OpName issued_as;
  };

  const char* name = "";  // name of the first call
  const ProcessGroup* process_group = nullptr;
  std::vector<Seat> seats;        // by rank; for send_recv: 0 sends, 1 receives
  std::vector<int> seat_ranks;    // device of each seat
  std::vector<std::byte> buffer;  // data of a buffered send
  bool buffered = false;
  State state = State::open;
  std::size_t begun = 0;

  bool complete() const { return begun == seats.size(); }
  // True if this seat waits for no other seat and no running transfer.
  bool satisfied(int seat) const {
    if (kind == CommKind::send_recv && seat == 0 && buffered) return true;
    return complete() && state != State::running;
  }
  // True if more than one rank takes part.
  bool is_shared() const {
    return std::adjacent_find(seat_ranks.begin(), seat_ranks.end(), std::not_equal_to<>()) != seat_ranks.end();
  }
  void transfer();  // Moves the data.
};

// Memory that all ranks of a process group registered in one collective call.
struct Windows {
  std::vector<char*> bases;  // by rank
  std::size_t bytes = 0;
  int arrived = 0;
  std::vector<Mapping> mappings;  // mappings of other processes' memory
};

struct ProcessGroup {
  explicit ProcessGroup(int size) : devices(size, -1), registered(size, 0), issued(size, 0) {}

  int size() const { return static_cast<int>(devices.size()); }

  // True if the process group would remain usable after a failure at this moment.
  bool in_step() const {
    if (shared) return shared->pending == 0;
    const auto equal = [](const auto& counts) {
      return std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
    };
    const auto met = [](const auto& entry) { return entry.second.sends.empty() && entry.second.recvs.empty(); };
    return arrived == size() && equal(issued) && equal(registered) && std::all_of(channels.begin(), channels.end(), met) &&
           std::all_of(signals.begin(), signals.end(), [](const auto& entry) { return entry.second->settled(); });
  }

  const char* name = "";
  std::shared_ptr<SharedGroup> shared;  // null unless ranks are processes
  std::vector<int> devices;             // by rank; -1 until the rank has joined
  int arrived = 0;
  bool stopped = false;  // true after a failure at which in_step() was false
  // The n-th collectives of all ranks match. The n-th send to a rank matches the n-th recv of that rank from the sender.
  std::map<std::uint64_t, std::shared_ptr<Match>> collectives;
  struct Channel {
    std::deque<std::shared_ptr<Match>> sends, recvs;  // not matched yet
  };
  std::map<std::pair<int, int>, Channel> channels;                            // (sender, receiver)
  std::map<std::tuple<int, int, int>, std::shared_ptr<SignalCount>> signals;  // by sender, receiver and number
  std::map<int, std::shared_ptr<Windows>> registrations;                      // unfinished registrations, by number
  std::vector<int> registered;                                                // number of registrations by rank
  std::vector<std::uint64_t> issued;                                          // number of collectives by rank
};

// Returns an error if the communicator is invalid, or stopped by a failure.
ncclResult_t check_usable(const std::string& call, ncclComm_t comm);
void wait_for_ops(Lock& lock, ncclComm_t comm);  // Waits for all ops on the communicator.
bool in_group();
void wait_at_group_end(std::shared_ptr<ProcessGroup> process_group);
ncclResult_t wait_for_process_group(Lock& lock, const ProcessGroup& process_group);  // Waits until all ranks have joined.
// Wraps `work`, which waits for other processes, as the work of an op.
std::function<void()> across_processes(std::shared_ptr<SharedGroup> shared, std::function<void(SharedGroup&)> work);

}  // namespace hostweave::cpu

struct ncclComm {
  hostweave::cpu::OpPtr last() const { return ops.empty() ? nullptr : ops.back(); }
  void add(const hostweave::cpu::OpPtr& op) {
    while (!ops.empty() && ops.front()->done) ops.pop_front();
    ops.push_back(op);
  }

  std::shared_ptr<hostweave::cpu::ProcessGroup> process_group;
  int rank = 0;
  int device = 0;
  std::deque<hostweave::cpu::OpPtr> ops;                       // ops of this rank since the first that is not done
  std::shared_ptr<bool> in_graphs = std::make_shared<bool>();  // graph nodes that use the communicator hold copies, so the
                                                               // use count tells if there are such nodes
};
