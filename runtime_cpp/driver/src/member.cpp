#include "hostweave/member.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <system_error>
#include <utility>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/reach.h"
#include "target.h"

namespace hw {
namespace {

using namespace std::chrono_literals;

constexpr auto kGrace = 2s;     // time for a running call to end, before and during the abort of its channels
constexpr auto kPatience = 5s;  // time to destroy or abort communicators; a graph or another user of the GPU may block NCCL

// Starts work on a new thread with this device current. Runs the work on this thread if no thread can be created.
std::future<void> started(int device, std::function<void()> work) {
  const auto task = std::make_shared<std::packaged_task<void()>>([device, work = std::move(work)] {
    const OnDevice current(device);
    work();
  });
  std::future<void> done = task->get_future();
  try {
    in_background([task] { (*task)(); });
  } catch (const std::system_error&) {
    (*task)();
  }
  return done;
}

}  // namespace

OnDevice::OnDevice(int device) {
  HW_CHECK(cudaGetDevice(&before_));
  changed_ = device != before_;
  if (changed_) HW_CHECK(cudaSetDevice(device));
}

OnDevice::~OnDevice() {
  if (changed_ && target::is_set_up(before_)) cudaSetDevice(before_);
}

Member::Member(std::string group, int device, int64_t index, int64_t size, bool processes)
    : group_(std::move(group)), rank_(device, index, size), processes_(processes) {}

Member::~Member() {
  destroy_graphs();
  if (owned_.empty() && peers_.empty()) return;
  const auto end = [comms = owned_, peers = std::make_shared<decltype(peers_)>(std::move(peers_)), aborted = aborted_.load()] {
    peers->clear();
    if (aborted) return target::abort(comms);
    for (const ncclComm_t comm : comms) ncclCommDestroy(comm);
  };
  started(device(), end).wait_for(kPatience);
}

int Member::device_for(int64_t index, int64_t local) { return target::device_for(index, local); }

std::vector<ProcessGroup> Member::missing_process_groups(const ProgramTable& program) const {
  if (program.world != rank_.size()) {
    throw ArgumentError("the program needs " + std::to_string(program.world) +
                        " ranks, but the number of ranks in the group is " + std::to_string(rank_.size()));
  }
  std::vector<ProcessGroup> process_groups = process_groups_of(program, rank_.index());
  std::erase_if(process_groups,
                [this](const ProcessGroup& one) { return rank_.has_channel(one.mesh.c_str(), one.axes.c_str(), one.transport); });
  return process_groups;
}

ncclUniqueId Member::new_process_group_id(const ProgramTable& program, const std::string& key) {
  const std::vector<ProcessGroup> all = process_groups_of(program, rank_.index());
  return new_id(std::ranges::find(all, key, &ProcessGroup::key)->transport);
}

ncclUniqueId Member::new_id(Transport transport) {
  const Use use(*this);
  if (transport == Transport::peer) return PeerGroup::new_id();
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  return id;
}

void Member::connect(const ProgramTable& program, const std::map<std::string, ncclUniqueId>& ids, double timeout_seconds) {
  const Use use(*this);
  for (const ProcessGroup& process_group : missing_process_groups(program))
    connect(process_group, ids.at(process_group.key), timeout_seconds);
}

void Member::connect(const ProcessGroup& process_group, const ncclUniqueId& id, double timeout_seconds) {
  expect_not_stopped();
  if (process_group.transport == Transport::peer) {
    auto peers = std::make_unique<PeerGroup>(id, process_group.rank_in_group, process_group.size, timeout_seconds, &aborted_);
    add_channel(process_group, *peers);
    const std::lock_guard lock(owned_mutex_);
    peers_.push_back(std::move(peers));
    return;
  }
  const ncclComm_t comm = target::make_channel(process_group, id, device(), timeout_seconds, aborted_);
  const std::lock_guard lock(owned_mutex_);
  owned_.push_back(comm);
  add_channel(process_group, comm);
}

template <class Communicator>
void Member::add_channel(const ProcessGroup& of, Communicator&& communicator) {
  rank_.add_channel(of.mesh.c_str(), of.axes.c_str(), Channel(communicator, of.rank_in_group, of.size, of.ranks), of.transport);
}

void Member::adopt(const ProgramTable& program, const std::map<std::string, ncclComm_t>& communicators) {
  const Use use(*this);
  for (const ProcessGroup& process_group : missing_process_groups(program)) {
    const std::string name =
        process_group.mesh == program.mesh ? process_group.name() : process_group.mesh + " " + process_group.name();
    const auto given = communicators.find(name);
    if (given == communicators.end()) {
      throw ArgumentError("no communicator along " + name + "; pass one for every process group that the program uses");
    }
    const ncclComm_t comm = given->second;
    int rank = 0, size = 0, device = 0;
    HW_CHECK(ncclCommUserRank(comm, &rank));
    HW_CHECK(ncclCommCount(comm, &size));
    HW_CHECK(ncclCommCuDevice(comm, &device));
    const auto text = [](int64_t rank, int64_t size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); };
    if (rank != process_group.rank_in_group || size != process_group.size) {
      throw ArgumentError("the communicator along " + name + ": this rank is " + text(rank, size) + "; the mesh needs " +
                          text(process_group.rank_in_group, process_group.size));
    }
    if (device != rank_.device()) {
      throw ArgumentError("the communicator along " + name + ": it is on device " + std::to_string(device) +
                          ", but this rank is on device " + std::to_string(rank_.device()));
    }
    add_channel(process_group, comm);
  }
}

std::string Member::out_of_reach(const ProgramTable& program) {
  const Use use(*this);
  for (const ProcessGroup& one : process_groups_of(program, rank_.index())) {
    if (one.transport == Transport::two_sided) continue;
    const Channel& channel = rank_.channel(one.mesh.c_str(), one.axes.c_str(), one.size, one.transport);
    if (std::string why = why_out_of_reach(channel); !why.empty()) return why;
    if (std::string why = why_no_windows(channel); !why.empty()) return why;
  }
  return "";
}

void Member::abort(const std::string& reason) {
  aborted_ = true;
  stop(reason);
  std::unique_lock use(in_use_, kGrace);  // After a timeout, target::abort ends the call, which may wait in NCCL.
  std::vector<ncclComm_t> comms;
  std::vector<std::future<void>> done;
  {
    const std::lock_guard lock(owned_mutex_);
    comms.swap(owned_);
    for (const auto& peers : peers_) done.push_back(started(device(), [group = peers.get()] { group->abort(); }));
  }
  // NCCL destroys a communicator only after the graphs that use it. CUDA destroys a graph only after its launches end, and the
  // abort ends them. So the abort starts first, on another thread.
  done.push_back(started(device(), [comms] { target::abort(comms); }));
  if (use || use.try_lock_for(kGrace)) destroy_graphs();
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (const std::future<void>& one : done) one.wait_until(end);
}

void Member::add_graph(cudaGraphExec_t graph) {
  const std::lock_guard lock(owned_mutex_);
  graphs_.insert(graph);
}

void Member::destroy_graph(cudaGraphExec_t graph) {
  const std::lock_guard lock(owned_mutex_);
  if (graphs_.erase(graph) != 0) cudaGraphExecDestroy(graph);
}

void Member::destroy_graphs() {
  const std::lock_guard lock(owned_mutex_);
  for (const cudaGraphExec_t graph : std::exchange(graphs_, {})) cudaGraphExecDestroy(graph);
}

void Member::stop(const std::string& reason) { DeviceLease::stop(group_, reason); }

std::string Member::stopped() const { return DeviceLease::stopped(group_); }

std::unique_ptr<DeviceLease> Member::lease(const Schedule& schedule, double seconds) const {
  auto lease = std::make_unique<DeviceLease>(group_, schedule, static_cast<int>(rank_.size()), seconds);
  return lease->held() ? std::move(lease) : nullptr;
}

void Member::synchronize(cudaStream_t stream) const {
  while (!target::synchronize(stream)) expect_not_stopped();
}

void Member::expect_not_stopped() const {
  if (const std::string reason = stopped(); !reason.empty()) throw ExecutionError(reason);
}

// Takes the lease first, and then the lock of the member. A thread that frees resources of a member uses the same order.
void Member::Use::take(Member& member, Schedule schedule, bool frees) {
  schedule.processes = member.processes_;
  if (target::kOneParty) turn_.emplace(member.group_, schedule, static_cast<int>(member.rank_.size()));
  lock_ = std::unique_lock(member.in_use_);
  if (member.aborted_ && !frees) throw ExecutionError("the group has failed; call hw.init again");
}

Member::Use::Use(Member& member, bool frees) {
  take(member, {}, frees);
  if (!frees) member.expect_not_stopped();
  device_.emplace(member.device());
}

Member::Use::Use(Member& member, const Schedule& schedule) {
  take(member, schedule, false);
  member.expect_not_stopped();
  attached_ = std::make_unique<target::Attached>(static_cast<int>(member.rank_.index()));
  device_.emplace(member.device());
}

Member::Use::~Use() = default;

}  // namespace hw
