#include "hostweave/world.h"

#include "hostweave/check.h"
#include "hostweave/device_memory.h"

namespace hw {
namespace {

void configure([[maybe_unused]] int devices, [[maybe_unused]] bool processes) {
#ifdef HOSTWEAVE_CPU_DEVICE
  hw_cpu_config config;
  config.devices = devices;
  config.processes = processes;
  if (hw_cpu_configure(&config) != 0) throw ExecutionError(hw_cpu_last_report());
#endif
}

int with_device(int device) {
  HW_CHECK(cudaSetDevice(device));
  return device;
}

}  // namespace

void use_devices(int count) {
  configure(count, false);
  int devices = 0;
  HW_CHECK(cudaGetDeviceCount(&devices));
  if (devices < count)
    throw ExecutionError("needs " + std::to_string(count) + " devices, and there are " + std::to_string(devices));
}

void use_processes() { configure(1, true); }

World::World(const ncclUniqueId& id, int device, int rank, int size) : rank_(with_device(device), rank, size) {
  communicator(id, rank, size);
}

ncclComm_t World::communicator(const ncclUniqueId& id, int rank, int size) {
  ncclComm_t comm;
  HW_CHECK(ncclCommInitRank(&comm, size, id, rank));
  comms_.emplace_back(comm, ncclCommDestroy);
  return comm;
}

void World::join(const char* mesh, const char* axes, Transport transport, int color, int rank_in_group, int64_t size) {
  if (!joined_.insert(std::string(mesh) + " " + axes + " " + name_of(transport)).second) return;
  ncclUniqueId id{};
  if (color != kNone && rank_in_group == 0) {
    if (transport == Transport::peer) {
      id = PeerGroup::new_id();
    } else {
      HW_CHECK(ncclGetUniqueId(&id));
    }
  }
  id = agree(color, rank_in_group, id);
  if (color == kNone) return;
  if (transport == Transport::peer) {
    constexpr double kSeconds = 300;  // timeout for the other ranks
    PeerGroup& peers = *peers_.emplace_back(std::make_unique<PeerGroup>(id, rank_in_group, size, kSeconds));
    if (const std::string& why = peers.why_out_of_reach(); !why.empty()) throw ExecutionError("transport peer: " + why);
    rank_.add_channel(mesh, axes, {peers, rank_in_group, size}, transport);
    return;
  }
  rank_.add_channel(mesh, axes, {communicator(id, rank_in_group, int(size)), rank_in_group, size}, transport);
}

// Id from the first rank of this rank's process group.
ncclUniqueId World::agree(int color, int rank_in_group, const ncclUniqueId& own) {
  struct Offer {
    int color, rank_in_group;
    ncclUniqueId id;
  };
  std::vector<Offer> offers(rank_.size());
  Offer& offer = offers[rank_.index()] = {color, rank_in_group, own};
  DeviceMemory memory;
  auto* const data = static_cast<char*>(memory.reserve(offers.size() * sizeof(Offer)));
  char* const own_slot = data + rank_.index() * sizeof(Offer);
  HW_CHECK(cudaMemcpy(own_slot, &offer, sizeof(Offer), cudaMemcpyHostToDevice));
  HW_CHECK(ncclAllGather(own_slot, data, sizeof(Offer), ncclUint8, comms_.front().get(), nullptr));
  HW_CHECK(cudaMemcpy(offers.data(), data, offers.size() * sizeof(Offer), cudaMemcpyDeviceToHost));
  for (const Offer& each : offers) {
    if (each.color == color && each.rank_in_group == 0) return each.id;
  }
  return own;
}

}  // namespace hw
