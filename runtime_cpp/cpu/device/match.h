// A collective, or a send with its recv: where the ops of several ranks meet.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "nccl.h"
#include "op.h"
#include "types.h"

namespace hostweave::cpu {

enum class CommKind { all_gather, all_reduce, reduce_scatter, broadcast, reduce, send_recv };

struct ProcessGroup;

// What all ranks of a collective, or both of a send with its recv, ask for alike.
struct Asked {
  CommKind kind = CommKind::send_recv;
  std::size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  int root = -1;  // of broadcast and reduce

  std::size_t bytes() const { return count * type_size(type); }
};

struct Match : Asked {
  enum class State { open, running, done };
  struct Seat {
    Stream* stream = nullptr;  // from issue to end
    bool issued = false;
    const void* send = nullptr;
    void* recv = nullptr;
    bool begun = false;
    ClockSnapshot clock;
    OpName issued_as;
  };

  const char* name = "";  // of the calls
  const ProcessGroup* process_group = nullptr;
  std::vector<Seat> seats;        // by rank; of a send_recv: 0 sends, 1 receives
  std::vector<int> seat_ranks;    // the devices behind the seats, for reports
  std::vector<std::byte> buffer;  // what a buffered send left behind
  bool buffered = false;
  State state = State::open;
  std::size_t begun = 0;

  bool complete() const { return begun == seats.size(); }
  // Whether the op at this seat has nothing left to wait for.
  bool satisfied(int seat) const {
    if (kind == CommKind::send_recv && seat == 0 && buffered) return true;
    return complete() && state != State::running;
  }
  // Whether more than one rank takes part.
  bool is_shared() const {
    return std::adjacent_find(seat_ranks.begin(), seat_ranks.end(), std::not_equal_to<>()) != seat_ranks.end();
  }
  // Whether what this seat ends with depends on what that seat began with; NCCL orders nothing else.
  bool data_flows(int from, int to) const {
    if (kind == CommKind::send_recv) return to == 1;
    if (kind == CommKind::broadcast) return from == root;
    if (kind == CommKind::reduce) return to == root;
    return true;
  }
  void exchange();  // moves the data; every seat's buffers are valid and nobody else touches them
};

}  // namespace hostweave::cpu
