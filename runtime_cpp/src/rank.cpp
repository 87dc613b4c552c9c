#include "hostweave/rank.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/peer.h"

namespace hw {

namespace {

// Priority of a stream. Streams that only communicate have the highest priority, so that their kernels do not queue behind all
// tiles of a matmul.
int priority_of(const std::string& stream) {
  if (stream != kCommStreams && stream != kPeerCopies) return 0;
  int least = 0, greatest = 0;
  HW_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  return greatest;
}

}  // namespace

struct Rank::Pools {
  std::map<std::pair<std::string, Transport>, Channel> channels;  // by mesh and axes, such as "mesh(x=8) x", and transport
  std::set<std::string> axes;                                     // axes of channels
  std::vector<SharedMemory> shared;
  std::map<std::string, std::vector<Stream>> streams;
  std::map<std::string, Handle> handles;  // by name
  cublasLtHandle_t blas = nullptr;
};

Rank::Rank(int device, int64_t index, int64_t size) : device_(device), index_(index), size_(size) {}

Rank::~Rank() {
  for (const auto& [name, streams] : pools_->streams) {
    for (const Stream& stream : streams) {
      if (stream.handle) cudaStreamDestroy(stream.handle);
      cudaFree(stream.workspace);
    }
  }
  if (pools_->blas) cublasLtDestroy(pools_->blas);
  for (const auto& [library, made] : pools_->handles) {
    if (made.handle) made.destroy(made.handle);
  }
}

Rank& Rank::expect_world(int64_t size) {
  if (size != size_) {
    throw ExecutionError("the program is for " + std::to_string(size) + " ranks, and the world has " + std::to_string(size_));
  }
  return *this;
}

void Rank::add_channel(const char* mesh, const char* axes, const Channel& channel, Transport transport) {
  const auto [added, _] = pools_->channels.emplace(std::pair(std::string(mesh) + " " + axes, transport), channel);
  added->second.set_shared(&pools_->shared);
  added->second.set_name(pools_->axes.emplace(axes).first->c_str());
}

bool Rank::has_channel(const char* mesh, const char* axes, Transport transport) const {
  return pools_->channels.contains(std::pair(std::string(mesh) + " " + axes, transport));
}

const Channel& Rank::channel(const char* mesh, const char* axes, int64_t size, Transport transport) const {
  const auto found = pools_->channels.find(std::pair(std::string(mesh) + " " + axes, transport));
  if (found == pools_->channels.end()) {
    throw ExecutionError(std::string("no channel of transport ") + name_of(transport) + " along " + axes + " of " + mesh +
                         ": add it to the rank before the program");
  }
  if (found->second.size() != size) {
    throw ExecutionError(std::string("the channel along ") + axes + " of " + mesh + " has " +
                         std::to_string(found->second.size()) + " ranks, and the program is for " + std::to_string(size));
  }
  return found->second;
}

const Channel& no_channel() {
  static const Channel none(ncclComm_t{}, 0, 0);
  return none;
}

const char* name_of(Transport transport) {
  constexpr const char* names[] = {"two_sided", "one_sided", "peer"};
  return names[static_cast<int>(transport)];
}

cudaError_t Channel::signal(int64_t peer, int number, cudaStream_t stream) const {
  if (CallLog* const log = CallLog::current()) log->gives_signal(*this, peer, number, stream);
  return peers_->signal(peer, number, stream);
}

cudaError_t Channel::wait_signal(int64_t peer, int number, cudaStream_t stream) const {
  if (CallLog* const log = CallLog::current()) log->awaits_signal(*this, peer, number, stream);
  return peers_->wait_signal(peer, number, stream);
}

char* Channel::on_peer(int64_t peer, const char* address) const {
  if (!shared_ || ranks_.empty()) return nullptr;
  for (const SharedMemory& memory : *shared_) {
    if (address >= memory.data && address < memory.data + memory.bytes)
      return memory.peers[ranks_[peer]] + (address - memory.data);
  }
  return nullptr;
}

void Rank::share(SharedMemory memory) { pools_->shared.push_back(std::move(memory)); }

void Rank::unshare(const char* data) {
  std::erase_if(pools_->shared, [data](const SharedMemory& memory) { return memory.data == data; });
}

cublasLtHandle_t Rank::blas() {
  if (!pools_->blas) HW_CHECK(cublasLtCreate(&pools_->blas));
  return pools_->blas;
}

Handle& Rank::handle(const char* library) { return pools_->handles[library]; }

Stream Rank::stream(const char* name, int i) {
  const auto found = pools_->streams.try_emplace(name).first;
  std::vector<Stream>& streams = found->second;
  if (streams.size() <= static_cast<size_t>(i)) streams.resize(i + 1);
  Stream& stream = streams[i];  // incomplete if it is new, or if an earlier call failed
  stream.name = found->first.c_str();
  stream.index = i;
  if (!stream.handle) HW_CHECK(cudaStreamCreateWithPriority(&stream.handle, cudaStreamNonBlocking, priority_of(name)));
  if (!stream.workspace) HW_CHECK(cudaMalloc(&stream.workspace, kWorkspaceBytes));
  return stream;
}

}  // namespace hw
