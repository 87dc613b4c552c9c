// Peer memory on GPUs. Signals are cuStreamBatchMemOp operations on words. The words are in an anonymous file that all ranks of
// a group map. The process that makes the group's id keeps the file open until all ranks have mapped the file.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/driver_function.h"
#include "hostweave/errors.h"
#include "hostweave/peer.h"
#include "hostweave/reach.h"
#include "hostweave/reached.h"
#include "hostweave/streams.h"

namespace hw {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 64;            // maximum ranks per group
constexpr uint32_t kMappings = 4096;  // mapping i needs the release of mapping i - kMappings by all ranks
constexpr auto kUnmapPatience = 5s;   // after a failure: time for enqueued work to end, and for peers to unmap memory
constexpr auto kWordPhase = 50us;     // time between toggles of all words during an abort
constexpr char kOtherTransport[] = "; compile with transport=\"two_sided\"";

// Contents of the file that the ranks of a group share. All members but `token` are initially zero.
struct Segment {
  std::atomic<uint64_t> token;
  std::atomic<int64_t> size;  // size of the group, set by the rank that joins first
  std::atomic<uint32_t> aborted;
  std::atomic<uint32_t> met;  // number of arrivals at all barriers
  struct Seat {
    std::atomic<uint32_t> taken;
    MemoryCard card;
    size_t bytes;
    char why[256];  // reason why this rank cannot use peer memory; empty if it can
  } seats[kRanks];
  std::atomic<uint32_t> unmapped[kMappings];  // see State::unmapped
  // Signal words, by sender, receiver and signal number. A small group uses only the first words.
  alignas(4096) uint32_t words[kRanks * kRanks * PeerGroup::kNumbers];
};

// Contents of a group's id.
struct Maker {
  uint64_t token;
  int64_t process;
  int file;
};
static_assert(sizeof(Maker) <= sizeof(ncclUniqueId));

std::mutex made_mutex;
// Files that this process has made, by token; guarded by made_mutex.
auto& made() { return immortal<std::map<uint64_t, int>, struct Made>(); }

void close_file_of(uint64_t token) {
  const std::lock_guard lock(made_mutex);
  if (const auto found = made().find(token); found != made().end()) {
    close(found->second);
    made().erase(found);
  }
}

// Returns null if the file cannot be opened or mapped, or is not the file of this group.
Segment* map_segment(const Maker& maker) {
  const std::string path = "/proc/" + std::to_string(maker.process) + "/fd/" + std::to_string(maker.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* data = MAP_FAILED;
  if (lseek(file, 0, SEEK_END) == static_cast<off_t>(sizeof(Segment)))
    data = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (data == MAP_FAILED) return nullptr;
  auto* const segment = static_cast<Segment*>(data);
  if (segment->token == maker.token) return segment;
  munmap(data, sizeof(Segment));
  return nullptr;
}

decltype(cuStreamBatchMemOp)* batch_mem_op() {
  static auto* const call = driver_function<decltype(cuStreamBatchMemOp)>("cuStreamBatchMemOp_v2");
  return call;
}

// Enqueues a wait until the word is `from`, followed by a write of `to`.
cudaError_t turn(uint32_t* word, uint32_t from, uint32_t to, cudaStream_t stream) {
  CUstreamBatchMemOpParams ops[2] = {};
  ops[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  ops[0].waitValue.address = reinterpret_cast<CUdeviceptr>(word);
  ops[0].waitValue.value = from;
  ops[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  ops[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;  // A system-wide memory barrier precedes the write.
  ops[1].writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  ops[1].writeValue.value = to;
  return static_cast<cudaError_t>(batch_mem_op()(stream, 2, ops, 0));
}

}  // namespace

struct PeerGroup::State {
  Segment* segment = nullptr;
  uint32_t* words = nullptr;  // device address
  int64_t rank = 0, size = 0;
  int device = 0;
  double timeout_seconds = 0;
  uint32_t meetings = 0, mappings = 0;         // numbers of barriers and mappings of this rank so far
  std::atomic<bool> stuck = false;             // set by an abort; reset if the device becomes idle within kUnmapPatience
  const std::atomic<bool>* aborted = nullptr;  // abort flag of the rank; null once the channel is created
  bool in_process = true;                      // all ranks are threads of this process
  std::string out_of_reach;

  ~State() {
    if (words) cudaHostUnregister(segment->words);
    if (segment) munmap(segment, sizeof(Segment));
  }

  size_t words_used() const { return static_cast<size_t>(size * size * kNumbers); }
  size_t word(int64_t sender, int64_t receiver, int number) const { return (sender * size + receiver) * kNumbers + number; }
  // Counter of the releases of a mapping by ranks. Mappings i and i + kMappings share a counter. The counter is never reset.
  std::atomic<uint32_t>& unmapped(uint32_t mapping) const { return segment->unmapped[mapping % kMappings]; }
  uint32_t unmapped_before(uint32_t mapping) const { return mapping / kMappings * static_cast<uint32_t>(size); }
  Segment::Seat& seat() const { return segment->seats[rank]; }

  // Barrier of all ranks. Throws ExecutionError on a timeout or abort.
  void meet(const char* what) {
    const auto end = Clock::now() + std::chrono::duration<double>(timeout_seconds);
    const uint32_t all = static_cast<uint32_t>(size) * ++meetings;
    ++segment->met;
    for (int looks = 0; segment->met < all; ++looks) {
      if (aborted && *aborted) throw ExecutionError(std::string(what) + ": the group has failed; call hw.init again");
      if (segment->aborted) throw ExecutionError(std::string(what) + ": another rank of the channel has failed");
      if (Clock::now() > end) {
        throw ExecutionError(std::string(what) + ": some ranks of the channel have not joined within " +
                             std::to_string(std::lround(timeout_seconds)) + " seconds");
      }
      looks < 1000 ? std::this_thread::yield() : std::this_thread::sleep_for(100us);
    }
  }

  // Calls `look` between two barriers. There, `look` can read the entries of the other ranks (`seats`) in the segment.
  template <class Look>
  void handshake(const char* what, const Look& look) {
    meet(what);
    look();
    meet(what);
  }

  // Reason why this rank cannot use the words on its device, or "".
  std::string try_words() {
    if (!batch_mem_op()) return "the driver has no stream memory operations";
    void* seen = nullptr;
    if (cudaHostRegister(segment->words, words_used() * sizeof(uint32_t), cudaHostRegisterPortable | cudaHostRegisterMapped) !=
            cudaSuccess ||
        cudaHostGetDevicePointer(&seen, segment->words, 0) != cudaSuccess) {
      cudaGetLastError();
      return "the GPU cannot map memory of the host";
    }
    words = static_cast<uint32_t*>(seen);
    const OwnStream stream;
    const size_t own = word(rank, rank, 0);  // unused by programs
    cudaError_t error = turn(words + own, 0, 1, stream);
    if (error == cudaSuccess) error = turn(words + own, 1, 0, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaGetLastError();
    return error == cudaSuccess ? "" : std::string("stream memory operations fail here: ") + cudaGetErrorString(error);
  }

  // Reason why this rank cannot map the test allocations of the other ranks, or "".
  std::string try_memory() const {
    for (int64_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      if (in_process &&
          segment->seats[peer].card.device == device)  // cudaMalloc of one rank would wait for the work of the other rank.
        return "rank " + std::to_string(peer) + " is a thread on the same GPU; run each rank in a separate process";
      void* const opened = open_memory(seat().card, segment->seats[peer].card);
      if (!opened) return "the GPU has no access to the GPU of rank " + std::to_string(peer) + " of the channel";
      close_memory(seat().card, segment->seats[peer].card, opened);
    }
    return "";
  }
};

namespace {

// Released memory, which can be freed after all ranks have unmapped it. After an abort of the group, the memory can be freed
// kUnmapPatience after its release.
struct GivenUp {
  void* data = nullptr;
  int device = 0;
  struct Part {
    std::shared_ptr<void> keeps;  // keeps the segment mapped
    const std::atomic<uint32_t>*unmapped, *aborted;
    uint32_t all;  // value of `unmapped` after all ranks have unmapped the memory
  };
  std::vector<Part> parts = {};
  Clock::time_point since = Clock::now();

  bool is_free() const {
    return std::ranges::all_of(parts, [&](const Part& part) {
      return *part.unmapped >= part.all || (*part.aborted && Clock::now() > since + kUnmapPatience);
    });
  }
};

std::mutex given_up_mutex;
// Memory that is not yet freed; guarded by given_up_mutex.
auto& given_up() { return immortal<std::vector<GivenUp>>(); }

// Frees memory for which is_free() is true, of the current device only. For another device, cudaFree would wait for work that may
// wait for this thread.
void free_what_is_unmapped() {
  int device = 0;
  HW_CHECK(cudaGetDevice(&device));
  std::vector<GivenUp> done;
  {
    const std::lock_guard lock(given_up_mutex);
    const auto rest =
        std::ranges::partition(given_up(), [&](const GivenUp& one) { return one.device != device || !one.is_free(); });
    done.assign(std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()));
    given_up().erase(rest.begin(), rest.end());
  }
  for (const GivenUp& one : done) free_shared(one.data);
}

// The peers' memory of one mapping, as opened by this rank.
struct Opened {
  MemoryCard own;
  std::vector<std::pair<MemoryCard, void*>> peers;
};

}  // namespace

ncclUniqueId PeerGroup::new_id() {
  Maker maker{.token = 0, .process = getpid(), .file = memfd_create("hostweave", MFD_CLOEXEC)};
  if (getrandom(&maker.token, sizeof maker.token, 0) != sizeof maker.token || maker.file < 0 ||
      ftruncate(maker.file, sizeof(Segment)) != 0 ||
      pwrite(maker.file, &maker.token, sizeof maker.token, offsetof(Segment, token)) != sizeof maker.token) {
    const std::string why = std::strerror(errno);
    if (maker.file >= 0) close(maker.file);
    throw ExecutionError("transport peer: processes cannot share memory: " + why + kOtherTransport);
  }
  ncclUniqueId id{};
  std::memcpy(&id, &maker, sizeof maker);
  const std::lock_guard lock(made_mutex);
  made()[maker.token] = maker.file;
  return id;
}

PeerGroup::PeerGroup(const ncclUniqueId& id, int64_t rank, int64_t size, double timeout_seconds, const std::atomic<bool>* aborted)
    : state_(std::make_shared<State>()) {
  Maker maker;
  std::memcpy(&maker, &id, sizeof maker);
  State& state = *state_;
  state.rank = rank, state.size = size, state.timeout_seconds = timeout_seconds, state.aborted = aborted;
  if (size > kRanks) {
    throw ExecutionError("transport peer: a channel has " + std::to_string(size) + " ranks, but the maximum is " +
                         std::to_string(kRanks) + kOtherTransport);
  }
  state.segment = map_segment(maker);
  if (!state.segment) {
    throw ExecutionError(
        "transport peer: process " + std::to_string(maker.process) +
        ", which made the channel, has ended or cannot be reached: all ranks must be processes of one user on one host" +
        kOtherTransport);
  }
  int64_t nobody = 0;
  if (!state.segment->size.compare_exchange_strong(nobody, size) && nobody != size)
    throw ExecutionError("transport peer: one rank expects " + std::to_string(nobody) +
                         " ranks in the channel, and another expects " + std::to_string(size));
  if (state.seat().taken.exchange(1)) throw ExecutionError("transport peer: two ranks have the index " + std::to_string(rank));

  HW_CHECK(cudaGetDevice(&state.device));
  state.seat().card = card_of_rank();
  state.handshake("transport peer", [&] {
    for (int64_t each = 0; each < size; ++each) {
      if (state.segment->seats[each].card.process != getpid()) state.in_process = false;
    }
  });
  void* const trial = allocate(kPiece);
  state.seat().card = with_memory(state.seat().card, trial);
  std::string why = state.try_words();
  state.handshake("transport peer", [&] {
    if (why.empty()) why = state.try_memory();
    std::strncpy(state.seat().why, why.c_str(), sizeof state.seat().why - 1);
  });
  state.handshake("transport peer", [&] {
    for (int64_t each = 0; each < size && state.out_of_reach.empty(); ++each) {
      if (const char* const one = state.segment->seats[each].why; *one)
        state.out_of_reach = "rank " + std::to_string(each) + " of the channel: " + one;
    }
  });
  free_shared(trial);
  close_file_of(maker.token);
  state.aborted = nullptr;
}

PeerGroup::~PeerGroup() = default;

const std::string& PeerGroup::why_out_of_reach() const { return state_->out_of_reach; }

void* PeerGroup::allocate(size_t bytes) { return allocate_shared(bytes, state_->in_process); }

void PeerGroup::map(void* data, size_t bytes, Mapping& mapping) {
  State& state = *state_;
  free_what_is_unmapped();
  if (state.unmapped(state.mappings) < state.unmapped_before(state.mappings))
    throw ExecutionError("transport peer: memory is still mapped after " + std::to_string(kMappings - 1) +
                         " later mappings; close unused programs");
  auto* const opened = new Opened{.own = with_memory(card_of_rank(), data)};
  mapping = {.group = this, .number = state.mappings++, .handle = opened};
  state.seat().card = opened->own;
  state.seat().bytes = bytes;
  std::string why;
  state.handshake("transport peer: mapping memory", [&] {
    for (int64_t peer = 0; peer < state.size; ++peer) {
      const Segment::Seat& seat = state.segment->seats[peer];
      void* const begin = peer == state.rank ? data : open_memory(opened->own, seat.card);
      const std::string named = "rank " + std::to_string(peer) + " of the channel";
      if (seat.bytes != bytes)
        why = named + " has " + std::to_string(seat.bytes) + " bytes, and this rank has " + std::to_string(bytes);
      if (!begin) why = "the GPU has no access to the GPU of " + named;
      opened->peers.emplace_back(seat.card, peer == state.rank ? nullptr : begin);
      mapping.begins.push_back(static_cast<char*>(begin));
    }
  });
  if (!why.empty()) throw ExecutionError("transport peer: memory cannot be mapped: " + why + kOtherTransport);
}

void PeerGroup::free(void* data, const std::vector<Mapping>& mappings) {
  GivenUp memory{.data = data};
  HW_CHECK(cudaGetDevice(&memory.device));
  for (const Mapping& mapping : mappings) {
    State& state = *mapping.group->state_;
    const std::unique_ptr<Opened> opened(static_cast<Opened*>(mapping.handle));
    for (const auto& [card, begin] : opened->peers) close_memory(opened->own, card, begin);
    std::atomic<uint32_t>& unmapped = state.unmapped(mapping.number);
    ++unmapped;
    const uint32_t all = state.unmapped_before(mapping.number) + static_cast<uint32_t>(state.size);
    memory.parts.push_back({mapping.group->state_, &unmapped, &state.segment->aborted, all});
  }
  if (data) {
    const std::lock_guard lock(given_up_mutex);
    given_up().push_back(std::move(memory));
  }
  free_what_is_unmapped();
}

cudaError_t PeerGroup::signal(int64_t peer, int number, cudaStream_t stream) {
  return turn(state_->words + state_->word(state_->rank, peer, number), 0, 1, stream);
}

cudaError_t PeerGroup::wait_signal(int64_t peer, int number, cudaStream_t stream) {
  return turn(state_->words + state_->word(peer, state_->rank, number), 1, 0, stream);
}

// Toggles all words until the device is idle, or for kUnmapPatience. So every wait sees the value that it waits for.
void PeerGroup::abort() {
  const std::shared_ptr<State> state = state_;
  state->segment->aborted = 1;
  if (!state->words) return;
  state->stuck = true;
  const auto idle = std::make_shared<std::atomic<bool>>(false);
  in_background([device = state->device, idle] {
    cudaSetDevice(device);
    cudaDeviceSynchronize();
    *idle = true;
  });
  const auto end = Clock::now() + kUnmapPatience;
  for (uint32_t value = 1; !*idle && Clock::now() < end; value = 1 - value) {
    for (size_t word = 0; word < state->words_used(); ++word) std::atomic_ref(state->segment->words[word]).store(value);
    std::this_thread::sleep_for(kWordPhase);
  }
  state->stuck = !*idle;
}

bool PeerGroup::is_stuck() const { return state_->stuck; }

}  // namespace hw
