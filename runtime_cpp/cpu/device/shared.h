// Communicators whose ranks are processes of one host, which meet in memory that all of them map.
//
// That memory is anonymous: the others open it by the number of the process that made it and of its file, and the kernel frees
// it with the last process that has it, however these end.
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

// A file without a name, of this process or of another one.
struct SharedFile {
  std::int64_t process = 0;
  int file = -1;
};

struct Unmap {
  std::size_t bytes = 0;
  void operator()(char* data) const;
};
using Mapping = std::unique_ptr<char[], Unmap>;

Mapping map(int file, std::size_t bytes);  // null where it cannot be mapped
int new_shared_file(std::size_t bytes);    // -1 where there is none left
// Maps a file of another process of this host. Null where that has ended, or cannot be reached.
Mapping map_shared(const SharedFile& file, std::size_t bytes);

// What is sent to a peer, or received from it, one piece after another.
struct Piece {
  char* data;
  std::size_t bytes;
  std::function<void()> then;  // when all of it has come
};
struct Traffic {
  explicit Traffic(int ranks) : out(ranks), in(ranks) {}
  std::vector<std::deque<Piece>> out, in;  // by peer

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

// One rank's view of the memory where the ranks of a communicator meet. Its calls that wait return false after a failure.
class SharedGroup {
 public:
  static constexpr int kRanks = 64, kSignals = 64;  // at most
  static constexpr int kCounts = 3 * kSignals;      // of each rank for each other one

  // The file for a new communicator, or -1.
  static int make(std::uint64_t token);
  // Null, and why, where the file cannot be reached or the others came as another number of ranks.
  static std::unique_ptr<SharedGroup> join(const SharedFile& file, std::uint64_t token, int rank, int size, int device,
                                           std::string& problem);

  bool wait_for_all(double seconds);  // false, too, where they do not come
  int arrived() const;
  int device_of(int rank) const;

  // Moves all of it, beside what other ranks send and receive.
  bool move(Traffic& traffic);
  void give_signal(int to, int number);
  bool await_signals(int from, int number, std::uint64_t count);

  // Ops that are enqueued and not done: what the ranks have issued is the same where there are none.
  std::atomic<int> pending = 0;

 private:
  struct Segment;
  struct Ring;
  SharedGroup(Mapping mapping, int rank, int size);

  Segment& segment() const;
  Ring& ring(int from, int to) const;
  std::atomic<std::uint64_t>& signals(int from, int to, int number) const;
  bool push(int to, std::deque<Piece>& pieces);
  bool pull(int from, std::deque<Piece>& pieces);
  // Has copy(place in the ring, data, bytes) move what it can of the pieces, from where `count` is to before `end`.
  template <class Copy>
  bool advance(std::atomic<std::uint64_t>& count, std::uint64_t end, int peer, std::deque<Piece>& pieces, const Copy& copy);
  void wake(int rank);
  // Asks `done` again whenever another rank has moved something, and now and then.
  bool wait(const std::function<bool()>& done);

  Mapping mapping_;
  int rank_, size_;
};

}  // namespace hostweave::cpu
