#include "hostweave/term_exchange.h"

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hostweave/device_memory.h"
#include "hostweave/errors.h"

#ifndef HOSTWEAVE_CPU_DEVICE
#include <unistd.h>
#endif

namespace hw {
namespace {

std::mutex words_mutex;

// By communicator the word that its kernels look at while they wait, in memory of the host.
std::map<ncclComm_t, uint32_t*>& words() {  // guarded by words_mutex
  static auto* const all = new std::map<ncclComm_t, uint32_t*>;
  return *all;
}

}  // namespace

struct TermExchange::Shared {
  bool prepared = false;
  bool in_packets = false;
  Exchange exchange{};
  int multiprocessors = 1;
  DeviceMemory gathered;

  // Lasts as long as the rank.
  static Shared& of(Rank& rank, const Channel& channel) {
    Handle& handle = rank.handle(("terms of " + std::to_string(reinterpret_cast<uintptr_t>(&channel))).c_str());
    if (!handle.handle) handle = {new Shared, [](void* shared) { delete static_cast<Shared*>(shared); }};
    return *static_cast<Shared*>(handle.handle);
  }

  void connect(const Channel& channel);
};

#ifdef HOSTWEAVE_CPU_DEVICE

void TermExchange::Shared::connect(const Channel&) {}

#else

namespace {

// What a rank tells the others of its landing memory.
struct Card {
  char machine[64];  // the boot of its host
  int64_t process;
  int device;
  void* landing;
  cudaIpcMemHandle_t handle;
};

Card card_of(void* landing) {
  Card card{};
  std::ifstream("/proc/sys/kernel/random/boot_id").read(card.machine, sizeof card.machine - 1);
  card.process = getpid();
  HW_CHECK(cudaGetDevice(&card.device));
  card.landing = landing;
  if (cudaIpcGetMemHandle(&card.handle, landing) != cudaSuccess) cudaGetLastError();  // then other processes do not reach it
  return card;
}

// The landing memory of another rank as this one's kernels see it, null where they do not.
Packet* reached(const Card& own, const Card& peer) {
  if (std::memcmp(own.machine, peer.machine, sizeof own.machine) != 0) return nullptr;
  void* landing = nullptr;
  cudaError_t error = cudaSuccess;
  if (own.process == peer.process) {
    int can = 0;
    error = cudaDeviceCanAccessPeer(&can, own.device, peer.device);
    if (error == cudaSuccess && can) error = cudaDeviceEnablePeerAccess(peer.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    landing = can ? peer.landing : nullptr;
  } else {
    error = cudaIpcOpenMemHandle(&landing, peer.handle, cudaIpcMemLazyEnablePeerAccess);
  }
  cudaGetLastError();
  return error == cudaSuccess ? static_cast<Packet*>(landing) : nullptr;
}

// What each rank has of these bytes, in their order.
template <class T>
std::vector<T> gather(const Channel& channel, const T& own) {
  std::vector<T> all(channel.size());
  DeviceMemory memory;
  char* const place = static_cast<char*>(memory.reserve(sizeof(T) * (channel.size() + 1)));
  cudaStream_t stream = nullptr;
  HW_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  HW_CHECK(cudaMemcpyAsync(place, &own, sizeof own, cudaMemcpyHostToDevice, stream));
  HW_CHECK(ncclAllGather(place, place + sizeof own, sizeof own, ncclUint8, channel.comm(), stream));
  HW_CHECK(cudaMemcpyAsync(all.data(), place + sizeof own, sizeof own * all.size(), cudaMemcpyDeviceToHost, stream));
  HW_CHECK(cudaStreamSynchronize(stream));
  HW_CHECK(cudaStreamDestroy(stream));
  return all;
}

}  // namespace

// The memory stays until the process ends: peers may have it open, and to free it then is not defined.
void TermExchange::Shared::connect(const Channel& channel) {
  const size_t bytes = sizeof(Packet) * 2 * channel.size() * kPackets;
  void* landing = nullptr;
  HW_CHECK(cudaMalloc(&landing, bytes + 2 * sizeof(uint32_t)));
  HW_CHECK(cudaMemset(landing, 0, bytes + 2 * sizeof(uint32_t)));  // before anybody knows of it
  HW_CHECK(cudaDeviceSynchronize());
  uint32_t* aborted = nullptr;
  HW_CHECK(cudaMallocHost(reinterpret_cast<void**>(&aborted), sizeof *aborted));
  *aborted = 0;
  exchange.state = reinterpret_cast<uint32_t*>(static_cast<char*>(landing) + bytes);
  exchange.aborted = aborted;
  exchange.rank = static_cast<int>(channel.rank());

  const Card own = card_of(landing);
  HW_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, own.device));
  const std::vector<Card> cards = gather(channel, own);
  int32_t reaches_all = 1;
  for (size_t peer = 0; peer < cards.size(); ++peer) {
    const bool is_own = static_cast<int64_t>(peer) == channel.rank();
    exchange.landing[peer] = is_own ? static_cast<Packet*>(landing) : reached(own, cards[peer]);
    if (!exchange.landing[peer]) reaches_all = 0;
  }
  in_packets = true;
  for (const int32_t reaches : gather(channel, reaches_all)) in_packets = in_packets && reaches;
  const std::lock_guard lock(words_mutex);
  words()[channel.comm()] = aborted;
}

#endif

TermExchange::TermExchange(Rank& rank, const Channel& channel) : channel_(channel), shared_(Shared::of(rank, channel)) {}

void TermExchange::prepare() {
  if (shared_.prepared) return;
  shared_.connect(channel_);
  if (!shared_.in_packets) shared_.gathered.reserve(kExchangeBytes * channel_.size());
  shared_.prepared = true;
}

CallOrder& TermExchange::calls(Rank& rank) {
  Handle& handle = rank.handle("calls that exchange terms");
  if (!handle.handle) handle = {new CallOrder, [](void* calls) { delete static_cast<CallOrder*>(calls); }};
  return *static_cast<CallOrder*>(handle.handle);
}

const Exchange& TermExchange::exchange() const { return shared_.exchange; }

int64_t TermExchange::most_blocks() const { return shared_.multiprocessors; }

const void* TermExchange::gathered(const void* own, int64_t bytes, cudaStream_t stream) const {
  if (bytes > kExchangeBytes) {
    throw ExecutionError("a term of " + std::to_string(bytes) + " bytes is too large for a kernel to reduce; the most are " +
                         std::to_string(kExchangeBytes));
  }
  if (bytes == 0) return this;  // anything but null: no exchange, as nobody would wait for it
  if (shared_.in_packets) return nullptr;
  HW_CHECK(ncclAllGather(own, shared_.gathered.data(), bytes, ncclUint8, channel_.comm(), stream));
  return shared_.gathered.data();
}

void abort_exchanges(ncclComm_t comm) {
  const std::lock_guard lock(words_mutex);
  const auto found = words().find(comm);
  if (found == words().end()) return;
  __atomic_store_n(found->second, 1, __ATOMIC_RELEASE);
  words().erase(found);
}

}  // namespace hw
