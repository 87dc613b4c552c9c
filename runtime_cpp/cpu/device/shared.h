// Communicators over shared memory, for ranks that are processes of one host.
//
// The memory is an anonymous file. Other processes open the file by process id and file descriptor. The OS frees the memory when
// no process maps it or has it open.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace hostweave::cpu {

// An anonymous file of this or another process.
struct SharedFile {
  std::int64_t process = 0;
  int file = -1;
};

struct Unmap {
  std::size_t bytes = 0;
  void operator()(char* data) const;
};
using Mapping = std::unique_ptr<char[], Unmap>;

Mapping map(int file, std::size_t bytes);  // null on failure
int new_shared_file(std::size_t bytes);    // -1 on failure
// Maps a file of another process of this host. Returns null on failure, for example if that process has ended.
Mapping map_shared(const SharedFile& file, std::size_t bytes);

// Bytes to send to a peer, or to receive from a peer.
struct Piece {
  char* data;
  std::size_t bytes;
  std::function<void()> then;  // called when the piece is complete
};
struct Traffic {
  explicit Traffic(int ranks) : out(ranks), in(ranks) {}
  std::vector<std::deque<Piece>> out, in;  // pieces by peer

  void send(int peer, const void* data, std::size_t bytes) {
    add(out[peer], {static_cast<char*>(const_cast<void*>(data)), bytes, {}});
  }
  void receive(int peer, void* data, std::size_t bytes, std::function<void()> then = {}) {
    add(in[peer], {static_cast<char*>(data), bytes, std::move(then)});
  }
  bool done() const;

 private:
  static void add(std::deque<Piece>& to, Piece piece) {
    if (piece.bytes != 0) to.push_back(std::move(piece));
  }
};

// One rank's view of a communicator's shared memory. Blocking calls return false after a failure.
class SharedGroup {
 public:
  static constexpr int kRanks = 64, kSignals = 64;  // maximum
  static constexpr int kCounts = 3 * kSignals;      // counters per pair of ranks

  // Creates the file of a new communicator. Returns -1 on failure.
  static int make(std::uint64_t token);
  // Returns null and sets `problem` on failure.
  static std::unique_ptr<SharedGroup> join(const SharedFile& file, std::uint64_t token, int rank, int size, int device,
                                           std::string& problem);

  bool wait_for_all(double seconds);  // false after a failure or a timeout
  int arrived() const;
  int device_of(int rank) const;

  // Sends and receives all pieces.
  bool move(Traffic& traffic);
  void give_signal(int to, int number);
  bool await_signals(int from, int number, std::uint64_t count);

  // Number of unfinished ops of this rank.
  std::atomic<int> pending = 0;

 private:
  struct Segment;
  struct Ring;
  SharedGroup(Mapping mapping, int rank, int size);

  Segment& segment() const;
  Ring& ring(int from, int to) const;
  bool push(int to, std::deque<Piece>& pieces);
  bool pull(int from, std::deque<Piece>& pieces);
  // Copies pieces by copy(ring position, data, bytes) until `count` equals `end` or no piece is left. Adds the copied
  // bytes to `count`. Returns true if any bytes were copied.
  template <class Copy>
  bool advance(std::atomic<std::uint64_t>& count, std::uint64_t end, int peer, std::deque<Piece>& pieces, const Copy& copy);
  void wake(int rank);
  // Waits until done() is true. Calls `done` periodically, and whenever another rank has made progress.
  bool wait(const std::function<bool()>& done);

  Mapping mapping_;
  int rank_, size_;
};

}  // namespace hostweave::cpu
