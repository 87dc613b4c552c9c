// Creation and destruction of communicators.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "communicator.h"
#include "errors.h"
#include "machine.h"

namespace hostweave::cpu {
namespace {

struct IdContent {
  char magic[16];
  SharedFile file;       // shared memory of the ranks if ranks are processes; otherwise file.file is -1
  std::uint64_t number;  // a random token if ranks are processes; otherwise unique in this process
};
constexpr char kMagic[16] = "hostweave cpu";

std::shared_ptr<ProcessGroup> new_process_group(int size) {
  static int count = 0;
  Machine& machine = Machine::get();
  auto process_group = std::make_shared<ProcessGroup>(size);
  process_group->name = machine.intern("communicator " + std::to_string(++count));
  std::erase_if(machine.process_groups, [](const auto& known) { return known.expired(); });
  machine.process_groups.push_back(process_group);
  return process_group;
}

ncclComm* new_communicator(std::shared_ptr<ProcessGroup> process_group, int rank) {
  auto* const comm = new ncclComm;
  comm->process_group = std::move(process_group);
  comm->rank = rank;
  comm->device = this_thread().device;
  comm->process_group->devices[rank] = comm->device;
  ++comm->process_group->arrived;
  Machine::get().communicators.insert(comm);
  Machine::get().progress();
  return comm;
}

void remove(ncclComm_t comm) {
  Machine::get().communicators.erase(comm);
  delete comm;
}

ncclResult_t init_across_processes(Lock& lock, ncclComm_t* comm, int size, const IdContent& id, int rank) {
  Machine& machine = Machine::get();
  std::string problem;
  const std::shared_ptr<SharedGroup> shared = SharedGroup::join(id.file, id.number, rank, size, this_thread().device, problem);
  bool all_came = false;
  if (shared) {
    lock.unlock();
    all_came = shared->wait_for_all(machine.config.timeout_seconds);
    lock.lock();
  }
  if (id.file.process == getpid() && machine.files_in_the_making.erase(id.file.file)) close(id.file.file);
  if (machine.failed()) return nccl_stopped();
  if (!shared) return error(ncclSystemError, "ncclCommInitRank: " + problem);
  if (!all_came) {
    return error(ncclSystemError, "ncclCommInitRank: " + std::to_string(shared->arrived()) + " of " + std::to_string(size) +
                                      " ranks joined in " + std::to_string(machine.config.timeout_seconds) + " seconds");
  }
  const std::shared_ptr<ProcessGroup> process_group = new_process_group(size);
  process_group->shared = shared;
  *comm = new_communicator(process_group, rank);
  process_group->arrived = size;
  for (int other = 0; other < size; ++other) process_group->devices[other] = shared->device_of(other);
  return ncclSuccess;
}

bool known(ncclComm_t comm) { return Machine::get().communicators.count(comm) != 0; }
ncclResult_t unknown(const std::string& call) { return error(ncclInvalidArgument, call + ": no such communicator"); }

// Waits until all graphs that use the communicator are destroyed, as NCCL does.
void wait_for_graphs(Lock& lock, ncclComm_t comm) {
  while (comm->in_graphs.use_count() > 1) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

ncclResult_t tell(ncclComm_t comm, const char* name, int* result, int (*property)(const ncclComm& comm)) {
  Call call;
  if (!known(comm)) return unknown(name);
  *result = property(*comm);
  return ncclSuccess;
}

}  // namespace

ncclResult_t check_usable(const std::string& call, ncclComm_t comm) {
  if (!known(comm)) return unknown(call);
  if (!comm->process_group->stopped) return ncclSuccess;
  return error(ncclInvalidUsage, call + ": the communicator was stopped by an earlier failure");
}

void wait_for_ops(Lock& lock, ncclComm_t comm) {
  wait_for(lock, {comm->ops.begin(), comm->ops.end()}, std::string("the ops of ") + comm->process_group->name);
}

ncclResult_t wait_for_process_group(Lock& lock, const ProcessGroup& process_group) {
  std::string what = "all " + std::to_string(process_group.size()) + " ranks of " + process_group.name;
  const bool all_came = Machine::get().wait(lock, std::move(what), [&] { return process_group.arrived == process_group.size(); });
  return all_came ? ncclSuccess : nccl_stopped();
}

}  // namespace hostweave::cpu

using namespace hostweave::cpu;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Call call;
  static std::uint64_t count = 0;
  IdContent content{};
  std::memcpy(content.magic, kMagic, sizeof kMagic);
  content.file.process = getpid();
  content.number = ++count;
  if (Machine::get().processes()) {
    std::random_device random;
    content.number = std::uint64_t{random()} << 32 | random();
    content.file.file = SharedGroup::make(content.number);
    if (content.file.file < 0)
      return error(ncclSystemError, std::string("ncclGetUniqueId: processes cannot share memory: ") + std::strerror(errno));
    Machine::get().files_in_the_making.insert(content.file.file);
  }
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &content, sizeof content);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  if (const auto result = expect_below(size, "rank", rank, "ncclCommInitRank", ncclInvalidArgument)) return result;
  IdContent content;
  std::memcpy(&content, id.internal, sizeof content);
  if (std::memcmp(content.magic, kMagic, sizeof kMagic) != 0) {
    return error(ncclInvalidArgument, "ncclCommInitRank: the id does not come from the CPU device's ncclGetUniqueId");
  }
  Call call;
  if (Machine::get().failed()) return nccl_stopped();
  if (Machine::get().fault("ncclCommInitRank")) return error(ncclSystemError, "ncclCommInitRank: made to fail");
  if (content.file.file >= 0) return init_across_processes(call.lock, comm, size, content, rank);
  if (content.file.process != getpid())
    return nccl_not_supported("a communicator of several processes, made without config.processes");
  auto& pending = Machine::get().process_groups_in_the_making;
  std::shared_ptr<ProcessGroup>& slot = pending[content.number];
  if (!slot) slot = new_process_group(size);
  const std::shared_ptr<ProcessGroup> process_group = slot;
  if (process_group->size() != size || process_group->devices[rank] != -1) {
    Machine::get().fail("ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(size) + " joined " +
                        process_group->name + ", which has " +
                        (process_group->size() != size ? std::to_string(process_group->size()) + " ranks" : "that rank already"));
    return error(ncclInvalidArgument, Machine::get().report());
  }
  *comm = new_communicator(process_group, rank);
  if (process_group->arrived == size) pending.erase(content.number);
  if (in_group()) {
    wait_at_group_end(process_group);
    return ncclSuccess;
  }
  const ncclResult_t result = wait_for_process_group(call.lock, *process_group);
  if (result != ncclSuccess) remove(std::exchange(*comm, nullptr));
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  if (!known(comm)) return unknown("ncclCommDestroy");
  wait_for_ops(call.lock, comm);
  wait_for_graphs(call.lock, comm);
  remove(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  if (!known(comm)) return unknown("ncclCommAbort");
  Machine& machine = Machine::get();
  const auto running = std::ranges::find_if(comm->ops, [](const OpPtr& op) { return !op->done; });
  if (running != comm->ops.end()) {
    machine.fail("device " + std::to_string(comm->device) + " aborted " + comm->process_group->name + " while " +
                 (*running)->name.text() + " was not done");
  }
  machine.wait_for_running_work(call.lock);
  wait_for_graphs(call.lock, comm);
  remove(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return tell(comm, "ncclCommCount", count, [](const ncclComm& known) { return known.process_group->size(); });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return tell(comm, "ncclCommCuDevice", device, [](const ncclComm& known) { return known.device; });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return tell(comm, "ncclCommUserRank", rank, [](const ncclComm& known) { return known.rank; });
}

}  // extern "C"
