// NCCL's collectives, sends and recvs. A call outside of groups becomes one op. The calls of a group become one op per
// communicator. If ranks are threads, their calls meet in a Match (communicator.h).
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capture.h"
#include "communicator.h"
#include "errors.h"
#include "machine.h"

namespace hostweave::cpu {
namespace {

struct Request : Asked {
  const char* name;
  const void* send;
  void* recv;
  int peer;    // for send and recv
  bool sends;  // for send and recv
  ncclComm_t comm;
  cudaStream_t stream;
  Location location;
};

struct Group {
  int depth = 0;
  std::vector<Request> requests;
  std::vector<std::shared_ptr<ProcessGroup>> process_groups_to_wait_for;
};
Group& group() {
  thread_local Group group;
  return group;
}

constexpr const char* kReductions[] = {"sum", "prod", "max", "min", "avg"};  // by ncclRedOp_t

// Index of the argument that is named in reports: the buffer of a send or recv, or the result of a collective.
int subject_of(const Request& r) { return r.kind == CommKind::send_recv ? 0 : 1; }

Ranges ranges_of(const Request& r) {
  const std::size_t bytes = r.bytes(), all = bytes * r.comm->process_group->size();
  const bool is_root = r.comm->rank == r.root, broadcasts = r.kind == CommKind::broadcast, pairs = r.kind == CommKind::send_recv;
  const bool reads = broadcasts ? is_root : !pairs || r.sends;
  const bool in_place = broadcasts && is_root && r.send == r.recv;
  const bool writes = r.kind == CommKind::reduce ? is_root : pairs ? !r.sends : !in_place;
  Ranges ranges;
  if (reads) ranges.push_back(read_of(r.send, r.kind == CommKind::reduce_scatter ? all : bytes));
  if (writes) ranges.push_back(write_of(r.recv, r.kind == CommKind::all_gather ? all : bytes));
  return ranges;
}

std::string difference(const Asked& theirs, const char* name, const Request& r) {
  const auto differ = [](const char* what, const std::string& theirs, const std::string& ours) {
    return std::string(what) + " differ: " + theirs + " and " + ours;
  };
  if (theirs.kind != r.kind) return differ("the kinds", name, r.name);
  if (theirs.count != r.count) return differ("the counts", std::to_string(theirs.count), std::to_string(r.count));
  if (theirs.type != r.type) return differ("the types", type_name(theirs.type), type_name(r.type));
  if (theirs.root != r.root) return differ("the roots", std::to_string(theirs.root), std::to_string(r.root));
  if (r.reduces() && theirs.reduction != r.reduction)
    return differ("the reductions", kReductions[theirs.reduction], kReductions[r.reduction]);
  return "";
}

std::shared_ptr<Match> new_match(const Request& r, std::vector<int> seat_ranks) {
  auto match = std::make_shared<Match>();
  static_cast<Asked&>(*match) = r;
  match->name = r.name;
  match->process_group = r.comm->process_group.get();
  match->buffered = r.kind == CommKind::send_recv && Machine::get().buffered_sends();
  match->seats.resize(seat_ranks.size());
  match->seat_ranks = std::move(seat_ranks);
  return match;
}

Part find_collective(const Request& r) {
  ProcessGroup& process_group = *r.comm->process_group;
  const std::uint64_t number = process_group.issued[r.comm->rank]++;
  std::shared_ptr<Match>& match = process_group.collectives[number];
  if (!match) match = new_match(r, process_group.devices);
  Part part{match, r.comm->rank};
  const auto is_open = [&](const Match::Seat& seat) { return !seat.issued && &seat != &match->seats[r.comm->rank]; };
  if (std::ranges::none_of(match->seats, is_open)) process_group.collectives.erase(number);
  return part;
}

Part find_send_recv(const Request& r) {
  ProcessGroup& process_group = *r.comm->process_group;
  const int from = r.sends ? r.comm->rank : r.peer, to = r.sends ? r.peer : r.comm->rank;
  ProcessGroup::Channel& channel = process_group.channels[{from, to}];
  auto& theirs = r.sends ? channel.recvs : channel.sends;
  auto& ours = r.sends ? channel.sends : channel.recvs;
  std::shared_ptr<Match> match;
  if (!theirs.empty()) {
    match = std::move(theirs.front());
    theirs.pop_front();
  } else {
    match = ours.emplace_back(new_match(r, {process_group.devices[from], process_group.devices[to]}));
  }
  return {std::move(match), r.sends ? 0 : 1};
}

// --- between processes

// Header of a message between ranks. Describes the call of the sender.
struct Header : Asked {
  char name[24], issued_as[256];
};

Header header_of(const Request& r, const std::string& issued_as) {
  Header header{r, {}, {}};
  std::strncpy(header.name, r.name, sizeof header.name - 1);
  std::strncpy(header.issued_as, issued_as.c_str(), sizeof header.issued_as - 1);
  return header;
}

std::string mismatch(const std::string& differs, const std::string& theirs, const std::string& ours) {
  return "mismatch: " + differs + "\n  " + theirs + "\n  " + ours;
}

void expect_same(const Header& theirs, const Request& ours, const std::string& issued_as) {
  const std::string differs = difference(theirs, theirs.name, ours);
  if (differs.empty()) return;
  const Lock lock(Machine::get().mutex);
  Machine::get().fail(mismatch(differs, theirs.issued_as, issued_as));
}

// Executes one request across processes.
class ProcessTransfer {
 public:
  ProcessTransfer(const Request& request, std::string issued_as, int rank, int size)
      : r_(request),
        issued_as_(std::move(issued_as)),
        ours_(header_of(r_, issued_as_)),
        theirs_(size),
        inputs_(size),
        rank_(rank) {}

  void begin(Traffic& traffic) {
    if (r_.kind == CommKind::send_recv) {
      r_.sends ? send(traffic, r_.peer, r_.send) : receive(traffic, r_.peer, r_.recv);
      return;
    }
    for (int peer = 0; peer < static_cast<int>(theirs_.size()); ++peer) {
      if (peer == rank_) continue;
      send(traffic, peer, r_.data_flows(rank_, peer) ? sent_to(peer) : nullptr);
      receive(traffic, peer, r_.data_flows(peer, rank_) ? received_from(peer) : nullptr);
    }
  }

  void finish() {
    if (!r_.data_flows(rank_, rank_)) return;
    if (!r_.reduces()) return copy_bytes(received_from(rank_), r_.send, r_.bytes());
    Match match;  // Match::transfer reduces the data of all ranks.
    static_cast<Asked&>(match) = r_;
    match.kind = CommKind::reduce;
    match.root = rank_;
    match.seats.resize(inputs_.size());
    for (std::size_t peer = 0; peer < inputs_.size(); ++peer) match.seats[peer].send = inputs_[peer].get();
    match.seats[rank_].send = sent_to(rank_);
    match.seats[rank_].recv = r_.recv;
    match.transfer();
  }

 private:
  const char* sent_to(int peer) const { return static_cast<const char*>(r_.send) + r_.sent_at(peer); }
  char* received_from(int peer) {
    if (!r_.reduces()) return static_cast<char*>(r_.recv) + r_.received_at(peer);
    inputs_[peer].reset(new char[r_.bytes()]);
    return inputs_[peer].get();
  }
  void send(Traffic& traffic, int peer, const void* data) const {
    traffic.send(peer, &ours_, sizeof ours_);
    if (data) traffic.send(peer, data, r_.bytes());
  }
  void receive(Traffic& traffic, int peer, void* data) {
    traffic.receive(peer, &theirs_[peer], sizeof(Header), [this, peer] { expect_same(theirs_[peer], r_, issued_as_); });
    if (data) traffic.receive(peer, data, r_.bytes());
  }

  Request r_;
  std::string issued_as_;
  Header ours_;
  std::vector<Header> theirs_;
  std::vector<std::unique_ptr<char[]>> inputs_;  // inputs of other ranks, to be reduced
  int rank_;
};

OpName name_of(const Request& r, const Stream& stream) {
  return {r.comm->device, stream.number, r.name, r.comm->process_group->name, subject_of(r), r.location};
}

// Returns the work of an op that exchanges data with other processes.
std::function<void()> transfer_between_processes(const std::vector<Request>& requests, const Stream& stream) {
  const ncclComm& comm = *requests.front().comm;
  const int rank = comm.rank, size = comm.process_group->size();
  std::vector<std::shared_ptr<ProcessTransfer>> transfers;
  for (const Request& r : requests)
    transfers.push_back(std::make_shared<ProcessTransfer>(r, name_of(r, stream).text(), rank, size));
  return across_processes(comm.process_group->shared, [transfers, size](SharedGroup& shared) {
    Traffic traffic(size);
    for (const auto& transfer : transfers) transfer->begin(traffic);
    if (!shared.move(traffic)) return;
    for (const auto& transfer : transfers) transfer->finish();
  });
}

ncclResult_t check(const Request& r) {
  const std::string call = std::string("nccl ") + r.name;
  if (const ncclResult_t result = check_usable(call, r.comm)) return result;
  if (type_size(r.type) == 0) return nccl_not_supported(call + ": type " + std::to_string(r.type));
  if (r.reduces() && (r.reduction < 0 || r.reduction >= ncclNumOps)) {
    return nccl_not_supported(call + ": reduction " + std::to_string(r.reduction));
  }
  const int n = r.comm->process_group->size();
  const bool rooted = r.kind == CommKind::broadcast || r.kind == CommKind::reduce;
  if (const auto result = expect_below(n, "root", rooted ? r.root : 0, call, ncclInvalidArgument)) return result;
  const bool paired = r.kind == CommKind::send_recv;
  if (const auto result = expect_below(n, "peer", paired ? r.peer : 0, call, ncclInvalidArgument)) return result;
  if (const auto illegal = Machine::get().illegal_access(ranges_of(r), r.comm->device, false)) {
    return error(ncclInvalidArgument, call + ": " + *illegal);
  }
  return ncclSuccess;
}

// Enqueues or captures the requests of one communicator as one op. The requests are already checked, and are in the order of the
// calls.
ncclResult_t issue(Lock& lock, const std::vector<Request>& requests) {
  Machine& machine = Machine::get();
  const Request& first = requests.front();
  ncclComm& comm = *first.comm;
  Stream* const stream = machine.find_stream(first.stream, comm.device);
  if (!stream) return nccl_not_supported("the per-thread default stream, or a stream that was destroyed");
  if (stream->device != comm.device) {
    return error(ncclInvalidArgument, std::string("nccl ") + first.name + ": a stream of device " +
                                          std::to_string(stream->device) + " with a communicator of device " +
                                          std::to_string(comm.device));
  }
  const auto again = [requests, in_graph = comm.in_graphs](Lock& lock, Stream& on) {
    std::vector<Request> there = requests;
    for (Request& r : there) r.stream = reinterpret_cast<cudaStream_t>(&on);
    return static_cast<int>(issue(lock, there));
  };
  if (const auto added = stream->capture ? add_node(*stream, again) : std::nullopt)
    return *added == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, last_error_text());
  OpPtr op = new_op("group of sends and recvs", -1);
  if (requests.size() == 1) op->name.kind = first.name, op->name.subject = subject_of(first);
  op->name.process_group = comm.process_group->name;
  for (const Request& r : requests) {
    const Ranges ranges = ranges_of(r);
    op->ranges.insert(op->ranges.end(), ranges.begin(), ranges.end());
    if (requests.size() > 1 && r.kind != CommKind::send_recv) op->name.kind = "group of communications";
  }
  for (const Request& r : requests) {
    if (comm.process_group->shared) break;
    Part part = r.kind == CommKind::send_recv ? find_send_recv(r) : find_collective(r);
    Match::Seat& seat = part.match->seats[part.index];
    seat.send = r.send;
    seat.recv = r.recv;
    seat.stream = stream;
    seat.issued = true;
    seat.issued_as = name_of(r, *stream);
    const std::string differs = difference(*part.match, part.match->name, r);
    if (!differs.empty()) {
      const Match::Seat* other = &seat;
      for (const Match::Seat& candidate : part.match->seats) {
        if (candidate.issued && &candidate != &seat) other = &candidate;
      }
      machine.fail(mismatch(differs, other->issued_as.text(), seat.issued_as.text()));
      return error(ncclInvalidUsage, machine.report());
    }
    op->parts.push_back(std::move(part));
  }
  if (comm.process_group->shared) op->work = transfer_between_processes(requests, *stream);
  const bool ordered = machine.ordered_launches() || comm.process_group->shared;
  const OpPtr last = comm.last();
  if (ordered && last && (machine.checking() || !last->done)) op->after.push_back(last);
  comm.add(op);
  HostThread& thread = this_thread();
  const Location location = std::exchange(thread.location, first.location);
  machine.enqueue(lock, std::move(op), *stream);
  thread.location = location;
  return machine.failed() ? nccl_stopped() : ncclSuccess;
}

ncclResult_t submit(std::vector<Request> requests) {
  Call call;
  while (!requests.empty()) {
    if (Machine::get().failed()) return nccl_stopped();
    std::vector<Request> of_one, others;
    for (Request& r : requests) (r.comm == requests.front().comm ? of_one : others).push_back(r);
    for (const Request& r : of_one) {
      if (const ncclResult_t result = check(r)) return result;
      if (r.stream != of_one.front().stream)
        return nccl_not_supported("a group with calls of one communicator on several streams");
    }
    if (const ncclResult_t result = issue(call.lock, of_one)) return result;
    requests = std::move(others);
  }
  return ncclSuccess;
}

ncclResult_t request(Request r) {
  r.location = this_thread().location;
  Group& g = group();
  if (g.depth == 0) return submit({r});
  g.requests.push_back(r);
  return ncclSuccess;
}

}  // namespace

std::function<void()> across_processes(std::shared_ptr<SharedGroup> shared, std::function<void(SharedGroup&)> work) {
  ++shared->pending;
  return [shared = std::move(shared), work = std::move(work)] {
    {
      const Machine::Blocked blocked;
      work(*shared);
    }
    if (!Machine::get().failed()) --shared->pending;
  };
}

bool in_group() { return group().depth > 0; }
void wait_at_group_end(std::shared_ptr<ProcessGroup> process_group) {
  group().process_groups_to_wait_for.push_back(std::move(process_group));
}

}  // namespace hostweave::cpu

using namespace hostweave::cpu;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  Group& g = group();
  if (g.depth == 0) return error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--g.depth > 0) return ncclSuccess;
  const auto process_groups = std::exchange(g.process_groups_to_wait_for, {});
  for (const auto& process_group : process_groups) {
    Call call;
    if (const ncclResult_t result = wait_for_process_group(call.lock, *process_group)) {
      g.requests.clear();
      return result;
    }
  }
  auto requests = std::exchange(g.requests, {});
  return requests.empty() ? ncclSuccess : submit(std::move(requests));
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return request({{CommKind::all_gather, count, type, ncclSum, -1}, "all_gather", send, recv, -1, false, comm, stream, {}});
}
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return request({{CommKind::all_reduce, count, type, op, -1}, "all_reduce", send, recv, -1, false, comm, stream, {}});
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return request({{CommKind::reduce_scatter, count, type, op, -1}, "reduce_scatter", send, recv, -1, false, comm, stream, {}});
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return request({{CommKind::broadcast, count, type, ncclSum, root}, "broadcast", send, recv, -1, false, comm, stream, {}});
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return request({{CommKind::reduce, count, type, op, root}, "reduce", send, recv, -1, false, comm, stream, {}});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return request({{CommKind::send_recv, count, type, ncclSum, -1}, "send", send, nullptr, peer, true, comm, stream, {}});
}
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return request({{CommKind::send_recv, count, type, ncclSum, -1}, "recv", nullptr, recv, peer, false, comm, stream, {}});
}

}  // extern "C"
