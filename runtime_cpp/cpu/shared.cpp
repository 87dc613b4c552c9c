#include "shared.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "machine.h"

namespace hostweave::cpu {

constexpr std::size_t kRingBytes = std::size_t{256} << 10;
constexpr std::size_t kLine = 64;         // cache line size
constexpr timespec kLook{0, 50'000'000};  // longest time between checks for a failure

void Unmap::operator()(char* data) const { munmap(data, bytes); }

Mapping map(int file, std::size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return {data == MAP_FAILED ? nullptr : static_cast<char*>(data), Unmap{bytes}};
}

int new_shared_file(std::size_t bytes) {
  const int file = memfd_create("hostweave", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  if (file >= 0) close(file);
  return -1;
}

Mapping map_shared(const SharedFile& of, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(of.process) + "/fd/" + std::to_string(of.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return {};
  Mapping mapping;
  if (lseek(file, 0, SEEK_END) >= static_cast<off_t>(bytes)) mapping = map(file, bytes);
  close(file);
  return mapping;
}

bool Traffic::done() const {
  const auto empty = [](const auto& pieces) { return pieces.empty(); };
  return std::ranges::all_of(out, empty) && std::ranges::all_of(in, empty);
}

// Header of a communicator's shared memory. The rings follow. The OS fills new shared memory with zeros.
struct SharedGroup::Segment {
  struct Seat {
    alignas(kLine) std::atomic<std::uint32_t> bell;  // incremented when something changes for this rank
    std::atomic<std::int32_t> device;                // device + 1; 0 until the rank has joined
  };
  std::uint64_t token;
  std::atomic<std::int32_t> size;  // set by the rank that joins first
  std::atomic<std::int32_t> arrived;
  Seat seats[kRanks];
  std::atomic<std::uint64_t> signals[kRanks][kRanks][kCounts];  // signals given so far: [sender][receiver][counter]
};

// Ring buffer from one rank to another.
struct SharedGroup::Ring {
  alignas(kLine) std::atomic<std::uint64_t> written;
  alignas(kLine) std::atomic<std::uint64_t> read;
  alignas(kLine) char bytes[kRingBytes];
};

// The file is sparse: untouched pages take no memory.
int SharedGroup::make(std::uint64_t token) {
  const int file = new_shared_file(sizeof(Segment) + sizeof(Ring) * kRanks * kRanks);
  if (file < 0) return -1;
  const Mapping mapping = map(file, sizeof(Segment));
  if (mapping.get()) reinterpret_cast<Segment*>(mapping.get())->token = token;
  return file;
}

std::unique_ptr<SharedGroup> SharedGroup::join(const SharedFile& file, std::uint64_t token, int rank, int size, int device,
                                               std::string& problem) {
  if (size > kRanks) {
    problem = "a communicator of " + std::to_string(size) + " processes; the CPU device allows " + std::to_string(kRanks);
    return nullptr;
  }
  Mapping mapping = map_shared(file, sizeof(Segment) + sizeof(Ring) * size * size);
  if (!mapping.get() || reinterpret_cast<Segment*>(mapping.get())->token != token) {
    problem = "the id of process " + std::to_string(file.process) +
              " cannot be opened: the process has ended, is of another host or user, or has closed the id; make one id per "
              "communicator";
    return nullptr;
  }
  std::unique_ptr<SharedGroup> group(new SharedGroup(std::move(mapping), rank, size));
  Segment& segment = group->segment();
  std::int32_t others = 0, nobody = 0;
  if (!segment.size.compare_exchange_strong(others, size) && others != size) {
    problem = "rank " + std::to_string(rank) + " of " + std::to_string(size) + " joined a communicator of size " +
              std::to_string(others);
    return nullptr;
  }
  if (!segment.seats[rank].device.compare_exchange_strong(nobody, device + 1)) {
    problem =
        "rank " + std::to_string(rank) + " of " + std::to_string(size) + " joined a communicator that already has that rank";
    return nullptr;
  }
  ++segment.arrived;
  for (int other = 0; other < size; ++other) group->wake(other);
  return group;
}

SharedGroup::SharedGroup(Mapping mapping, int rank, int size) : mapping_(std::move(mapping)), rank_(rank), size_(size) {}

SharedGroup::Segment& SharedGroup::segment() const { return *reinterpret_cast<Segment*>(mapping_.get()); }
SharedGroup::Ring& SharedGroup::ring(int from, int to) const {
  return reinterpret_cast<Ring*>(mapping_.get() + sizeof(Segment))[from * size_ + to];
}

int SharedGroup::arrived() const { return segment().arrived; }
int SharedGroup::device_of(int rank) const { return segment().seats[rank].device - 1; }

bool SharedGroup::wait_for_all(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  wait([&] { return arrived() == size_ || std::chrono::steady_clock::now() > end; });
  return arrived() == size_;
}

bool SharedGroup::wait(const std::function<bool()>& done) {
  std::atomic<std::uint32_t>& bell = segment().seats[rank_].bell;
  for (;;) {
    const std::uint32_t seen = bell.load();
    if (done()) return true;
    if (Machine::get().failed()) return false;
    syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &kLook, nullptr, 0);  // std::atomic::wait does not work across processes
  }
}

void SharedGroup::wake(int rank) {
  std::atomic<std::uint32_t>& bell = segment().seats[rank].bell;
  ++bell;
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool SharedGroup::move(Traffic& traffic) {
  return wait([&] {
    for (bool moved = true; moved && !Machine::get().failed();) {
      moved = false;
      for (int peer = 0; peer < size_; ++peer) moved |= push(peer, traffic.out[peer]) | pull(peer, traffic.in[peer]);
    }
    return traffic.done();
  });
}

template <class Copy>
bool SharedGroup::advance(std::atomic<std::uint64_t>& count, std::uint64_t end, int peer, std::deque<Piece>& pieces,
                          const Copy& copy) {
  const std::uint64_t begun = count.load(std::memory_order_relaxed);
  std::uint64_t now = begun;
  while (!pieces.empty() && now < end) {
    Piece& piece = pieces.front();
    const std::size_t at = now % kRingBytes;
    const std::size_t bytes = std::min({piece.bytes, static_cast<std::size_t>(end - now), kRingBytes - at});
    copy(at, piece.data, bytes);
    now += bytes;
    piece.data += bytes;
    piece.bytes -= bytes;
    if (piece.bytes != 0) continue;
    const auto then = std::move(piece.then);
    pieces.pop_front();
    if (then) then();
    if (Machine::get().failed()) return false;  // `then` may have found that the ranks disagree.
  }
  if (now == begun) return false;
  count.store(now, std::memory_order_release);
  wake(peer);
  return true;
}

bool SharedGroup::push(int to, std::deque<Piece>& pieces) {
  Ring& ring = this->ring(rank_, to);
  const std::uint64_t end = ring.read.load(std::memory_order_acquire) + kRingBytes;
  return advance(ring.written, end, to, pieces,
                 [&](std::size_t at, const char* from, std::size_t bytes) { std::memcpy(ring.bytes + at, from, bytes); });
}

bool SharedGroup::pull(int from, std::deque<Piece>& pieces) {
  Ring& ring = this->ring(from, rank_);
  const std::uint64_t end = ring.written.load(std::memory_order_acquire);
  return advance(ring.read, end, from, pieces,
                 [&](std::size_t at, char* to, std::size_t bytes) { std::memcpy(to, ring.bytes + at, bytes); });
}

void SharedGroup::give_signal(int to, int number) {
  segment().signals[rank_][to][number].fetch_add(1, std::memory_order_release);
  wake(to);
}

bool SharedGroup::await_signals(int from, int number, std::uint64_t count) {
  return wait([&] { return segment().signals[from][rank_][number].load(std::memory_order_acquire) >= count; });
}

}  // namespace hostweave::cpu
