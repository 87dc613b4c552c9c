#include "hostweave/term_exchange.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hostweave/background.h"
#include "hostweave/device_memory.h"
#include "hostweave/errors.h"
#include "hostweave/group.h"

#ifndef HOSTWEAVE_CPU_DEVICE
#include "hostweave/reached.h"
#endif

namespace hw {
namespace {

std::mutex words_mutex;
// Abort words in host memory, by communicator. Waiting kernels poll the word of their communicator.
auto& words() { return immortal<std::map<ncclComm_t, uint32_t*>, struct Words>(); }  // guarded by words_mutex

}  // namespace

struct TermExchange::Shared {
  bool prepared = false;
  bool in_packets = false;
  Exchange exchange{};
  DeviceMemory gathered;
  const void* sent = nullptr;  // blocks that a kernel has sent; their reduce-scatter is not yet launched

  // Returns the resources of a channel. The resources live as long as the rank.
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

// All-gathers a small object.
template <class T>
std::vector<T> gather(const Channel& channel, const T& own) {
  std::vector<T> all(channel.size());
  DeviceMemory memory;
  char* const terms = static_cast<char*>(memory.reserve(sizeof(T) * (channel.size() + 1)));
  const OwnStream stream;
  HW_CHECK(cudaMemcpyAsync(terms, &own, sizeof own, cudaMemcpyHostToDevice, stream));
  HW_CHECK(ncclAllGather(terms, terms + sizeof own, sizeof own, ncclUint8, channel.comm(), stream));
  HW_CHECK(cudaMemcpyAsync(all.data(), terms + sizeof own, sizeof own * all.size(), cudaMemcpyDeviceToHost, stream));
  HW_CHECK(cudaStreamSynchronize(stream));
  return all;
}

}  // namespace

// The landing memory is never freed, because peers may still access this memory.
void TermExchange::Shared::connect(const Channel& channel) {
  const size_t packets = sizeof(Packet) * 2 * channel.size() * kPackets;
  const size_t bytes = packets + 2 * kBlockBytes + sizeof(uint32_t) * channel.size() * kParts;
  const MemoryCard rank = card_of_rank();
  bool in_process = true;
  for (const MemoryCard& card : gather(channel, rank)) in_process = in_process && card.process == rank.process;
  void* const landing = allocate_shared(bytes + 2 * sizeof(uint32_t), in_process);
  // The memset precedes the exchange of addresses, because peers write as soon as they know the address.
  HW_CHECK(cudaMemset(landing, 0, bytes + 2 * sizeof(uint32_t)));
  HW_CHECK(cudaDeviceSynchronize());
  uint32_t* aborted = nullptr;
  HW_CHECK(cudaMallocHost(reinterpret_cast<void**>(&aborted), sizeof *aborted));
  *aborted = 0;
  exchange.state = reinterpret_cast<uint32_t*>(static_cast<char*>(landing) + bytes);
  exchange.aborted = aborted;
  exchange.rank = static_cast<int>(channel.rank());

  const MemoryCard own = with_memory(rank, landing);
  const std::vector<MemoryCard> cards = gather(channel, own);
  int32_t reaches_all = 1;
  for (size_t peer = 0; peer < cards.size(); ++peer) {
    const bool is_own = static_cast<int64_t>(peer) == channel.rank();
    exchange.landing[peer] = static_cast<Packet*>(is_own ? landing : open_memory(own, cards[peer]));
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
  if (!shared_.in_packets) shared_.gathered.reserve(std::max(kExchangeBytes * channel_.size(), kBlockBytes));
  shared_.prepared = true;
}

CallOrder& TermExchange::calls(Rank& rank) {
  Handle& handle = rank.handle("calls that exchange terms");
  if (!handle.handle) handle = {new CallOrder, [](void* calls) { delete static_cast<CallOrder*>(calls); }};
  return *static_cast<CallOrder*>(handle.handle);
}

const Exchange& TermExchange::exchange() const { return shared_.exchange; }

bool TermExchange::note_sent(const void* own) const {
  shared_.sent = shared_.in_packets ? own : nullptr;
  return shared_.in_packets;
}

bool TermExchange::take_sent(const void* own) const { return std::exchange(shared_.sent, nullptr) == own; }

const void* TermExchange::gathered(const void* own, int64_t bytes, int64_t most, bool scatters, cudaStream_t stream) const {
  if (bytes > most) {
    throw ExecutionError("a block of " + std::to_string(bytes) + " bytes is too large for kernels to exchange; the maximum is " +
                         std::to_string(most));
  }
  if (bytes == 0) return this;  // There is nothing to gather. A null pointer would tell the kernel to exchange data.
  if (shared_.in_packets) return nullptr;
  char* const all = static_cast<char*>(shared_.gathered.data());
  if (!scatters) {
    HW_CHECK(ncclAllGather(own, all, bytes, ncclUint8, channel_.comm(), stream));
    return all;
  }
  HW_CHECK(ncclGroupStart());
  const CloseGroupOnError guard;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    HW_CHECK(ncclSend(static_cast<const char*>(own) + peer * bytes, bytes, ncclUint8, peer, channel_.comm(), stream));
    HW_CHECK(ncclRecv(all + peer * bytes, bytes, ncclUint8, peer, channel_.comm(), stream));
  }
  HW_CHECK(ncclGroupEnd());
  return all;
}

void abort_exchanges(ncclComm_t comm) {
  const std::lock_guard lock(words_mutex);
  const auto found = words().find(comm);
  if (found == words().end()) return;
  __atomic_store_n(found->second, 1, __ATOMIC_RELEASE);
  words().erase(found);
}

}  // namespace hw
