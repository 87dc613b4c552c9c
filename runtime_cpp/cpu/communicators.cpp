// Making and unmaking communicators.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "communicator.h"
#include "errors.h"
#include "group.h"
#include "machine.h"

namespace hostweave::cpu {
namespace {

struct IdContent {
  char magic[16];
  std::int64_t process;
  std::uint64_t number;
};
constexpr char kMagic[16] = "hostweave cpu";

std::map<std::uint64_t, std::shared_ptr<Team>>& teams_in_the_making() {  // guarded by the machine's mutex
  static auto* const teams = new std::map<std::uint64_t, std::shared_ptr<Team>>;
  return *teams;
}

const char* name_in(const ncclConfig_t* config) {
  if (!config || config->magic != NCCL_API_MAGIC || config->size < offsetof(ncclConfig_t, commName) + sizeof(char*))
    return nullptr;
  return config->commName;
}

ncclResult_t check(const ncclConfig_t* config) {
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_API_MAGIC) return error(ncclInvalidArgument, "ncclConfig_t: not made by NCCL_CONFIG_INITIALIZER");
  if (config->blocking == 0) return nccl_not_supported("a communicator with blocking = 0");
  return ncclSuccess;
}

std::shared_ptr<Team> new_team(int size, const char* name) {
  static int count = 0;
  Machine& machine = Machine::get();
  auto team = std::make_shared<Team>(size);
  ++count;
  team->name = machine.intern(name ? std::string(name) : "communicator " + std::to_string(count));
  std::erase_if(machine.teams, [](const auto& known) { return known.expired(); });
  machine.teams.push_back(team);
  return team;
}

ncclComm* new_communicator(std::shared_ptr<Team> team, int rank) {
  auto* const comm = new ncclComm;
  comm->team = std::move(team);
  comm->rank = rank;
  comm->device = this_thread().device;
  comm->team->devices[rank] = comm->device;
  ++comm->team->arrived;
  Machine::get().communicators.insert(comm);
  Machine::get().progress();
  return comm;
}

void remove(ncclComm_t comm) {
  Machine::get().communicators.erase(comm);
  delete comm;
}

ncclResult_t wait_for_team(Lock& lock, const Team& team) {
  std::string what = "all " + std::to_string(team.size()) + " ranks of " + team.name;
  const bool all_came = Machine::get().wait(lock, std::move(what), [&] { return team.arrived == team.size(); });
  return all_came ? ncclSuccess : nccl_stopped();
}

ncclResult_t init(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  if (const ncclResult_t result = check(config)) return result;
  if (size < 1 || rank < 0 || rank >= size) {
    return error(ncclInvalidArgument, "ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(size));
  }
  IdContent content;
  std::memcpy(&content, id.internal, sizeof content);
  if (std::memcmp(content.magic, kMagic, sizeof kMagic) != 0) {
    return error(ncclInvalidArgument, "ncclCommInitRank: the id does not come from the CPU device's ncclGetUniqueId");
  }
  if (content.process != getpid()) return nccl_not_supported("a communicator of several processes");
  Call call;
  if (Machine::get().failed()) return nccl_stopped();
  if (Machine::get().fault("ncclCommInitRank")) return error(ncclSystemError, "ncclCommInitRank: made to fail");
  auto& pending = teams_in_the_making();
  std::shared_ptr<Team>& slot = pending[content.number];
  if (!slot) slot = new_team(size, name_in(config));
  const std::shared_ptr<Team> team = slot;
  if (team->size() != size || team->devices[rank] != -1) {
    Machine::get().fail("ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(size) + " came to " +
                        team->name + " of " + std::to_string(team->size()) +
                        (team->size() != size ? "" : ", where that rank already is"));
    return error(ncclInvalidArgument, Machine::get().report());
  }
  *comm = new_communicator(team, rank);
  if (team->arrived == size) pending.erase(content.number);
  if (in_group()) {
    wait_at_group_end(team);
    return ncclSuccess;
  }
  const ncclResult_t result = wait_for_team(call.lock, *team);
  if (result != ncclSuccess) remove(std::exchange(*comm, nullptr));
  return result;
}

// Every rank has said which team it wants to be in: ranks of a color are ordered by key, then by their old rank.
void form_teams(Team::Split& split) {
  std::stable_sort(split.wishes.begin(), split.wishes.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.key, a.rank) < std::pair(b.key, b.rank); });
  std::map<int, int> sizes;
  std::map<int, const char*> names;
  for (const auto& wish : split.wishes) {
    split.new_ranks[wish.rank] = sizes[wish.color]++;
    if (wish.name) names[wish.color] = wish.name;
  }
  for (const auto& [color, size] : sizes) {
    if (color >= 0) split.teams[color] = new_team(size, names.count(color) ? names[color] : nullptr);
  }
}

bool known(ncclComm_t comm) { return Machine::get().communicators.count(comm) != 0; }
ncclResult_t unknown(const char* call) { return error(ncclInvalidArgument, std::string(call) + ": no such communicator"); }

void wait_for_ops(Lock& lock, ncclComm_t comm) {
  const OpPtr last = comm->last;
  if (last) Machine::get().wait(lock, std::string("the ops of ") + comm->team->name, [last] { return last->done; });
}

}  // namespace

ncclResult_t wait_for_team(const Team& team) {
  Call call;
  return wait_for_team(call.lock, team);
}

}  // namespace hostweave::cpu

using namespace hostweave::cpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Call call;
  static std::uint64_t count = 0;
  IdContent content{};
  std::memcpy(content.magic, kMagic, sizeof kMagic);
  content.process = getpid();
  content.number = ++count;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &content, sizeof content);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return init(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(comm, size, id, rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  Call call;
  Machine& machine = Machine::get();
  if (machine.failed()) return nccl_stopped();
  if (count < 1) return error(ncclInvalidArgument, "ncclCommInitAll: no device");
  for (int rank = 0; rank < count; ++rank) {
    const int device = devices ? devices[rank] : rank;
    if (device < 0 || device >= machine.config.devices) {
      return error(ncclInvalidArgument,
                   "ncclCommInitAll: device " + std::to_string(device) + " of " + std::to_string(machine.config.devices));
    }
  }
  const auto team = new_team(count, nullptr);
  HostThread& thread = this_thread();
  const int device = thread.device;
  for (int rank = 0; rank < count; ++rank) {
    thread.device = devices ? devices[rank] : rank;
    comms[rank] = new_communicator(team, rank);
  }
  thread.device = device;
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* result, ncclConfig_t* config) {
  if (in_group()) return nccl_not_supported("ncclCommSplit in a group");
  if (const ncclResult_t bad = check(config)) return bad;
  Call call;
  Machine& machine = Machine::get();
  if (machine.failed()) return nccl_stopped();
  if (!known(comm)) return unknown("ncclCommSplit");
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return error(ncclInvalidArgument, "ncclCommSplit: a negative color");
  const std::shared_ptr<Team> team = comm->team;
  const int number = team->splits[comm->rank]++;
  Team::Split& split = team->split_calls[number];
  const char* const name = name_in(config);
  split.wishes.push_back({color, key, comm->rank, name ? machine.intern(name) : nullptr});
  const std::size_t all = team->devices.size();
  if (split.wishes.size() == all) form_teams(split);
  machine.progress();
  const std::string what = "all ranks of " + std::string(team->name) + " to split it";
  if (!machine.wait(call.lock, what, [&] { return split.wishes.size() == all; })) return nccl_stopped();
  *result = color < 0 ? nullptr : new_communicator(split.teams[color], split.new_ranks[comm->rank]);
  const std::shared_ptr<Team> mine = color < 0 ? nullptr : split.teams[color];
  if (++split.left == team->size()) team->split_calls.erase(number);
  return mine ? wait_for_team(call.lock, *mine) : ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Call call;
  if (!known(comm)) return unknown("ncclCommFinalize");
  wait_for_ops(call.lock, comm);
  comm->finalized = true;
  return Machine::get().failed() ? nccl_stopped() : ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  if (!known(comm)) return unknown("ncclCommDestroy");
  wait_for_ops(call.lock, comm);
  remove(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  if (!known(comm)) return unknown("ncclCommAbort");
  Machine& machine = Machine::get();
  if (comm->last && !comm->last->done) {
    machine.fail("rank " + std::to_string(comm->device) + " aborted " + comm->team->name + " while " + comm->last->name.text() +
                 " was not done");
  }
  machine.wait_for_running_work(call.lock);
  remove(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  Call call;
  if (!known(comm)) return unknown("ncclCommGetAsyncError");
  *asyncError = Machine::get().failed() || comm->team->stopped ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  Call call;
  if (!known(comm)) return unknown("ncclCommCount");
  *count = comm->team->size();
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  Call call;
  if (!known(comm)) return unknown("ncclCommCuDevice");
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  Call call;
  if (!known(comm)) return unknown("ncclCommUserRank");
  *rank = comm->rank;
  return ncclSuccess;
}

}  // extern "C"
