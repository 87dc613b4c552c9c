// When a program's temporaries come and go, told in the order of the program. What is free lends its bytes to what comes next.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace hw {

class Streams;

// From moment `first` to before moment `last` a buffer is in use. One that belongs to a single stream lends its bytes at once to
// what is allocated on that stream next, and to all others from moment `visible_at` on.
struct Use {
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

  int64_t first = 0, last = kForever, visible_at = kForever;
};

struct Lifetime {
  size_t bytes = 0;
  const void* pool = nullptr;  // of the stream that it belongs to; null: it belongs to all
  int64_t stream = 0;
  bool in_window = false;  // of memory that peers reach, which has one layout on all ranks, whatever else each of them has
  std::vector<Use> uses;   // one after another
};

class MemoryPlan {
 public:
  MemoryPlan();
  ~MemoryPlan();

  // A buffer that has been freed may be allocated again: it is the same one then.
  template <class T>
  void allocate(T*& pointer, int64_t count) {
    allocate({reinterpret_cast<void**>(&pointer), 1}, count * sizeof(T), nullptr);
  }
  // The same in a window.
  template <class T>
  void allocate_window(T*& pointer, int64_t count) {
    allocate({reinterpret_cast<void**>(&pointer), 1}, count * sizeof(T), nullptr, true);
  }
  // A buffer for each of these streams.
  template <class T, size_t n>
  void allocate(std::array<T*, n>& pointers, int64_t count, const Streams& streams) {
    allocate({reinterpret_cast<void**>(pointers.data()), n}, count * sizeof(T), &streams);
  }
  template <class T, size_t n>
  void allocate_window(std::array<T*, n>& pointers, int64_t count, const Streams& streams) {
    allocate({reinterpret_cast<void**>(pointers.data()), n}, count * sizeof(T), &streams, true);
  }
  // A buffer of so many bytes for each pointer: of all streams, or one for each of the first of a pool.
  void allocate(std::span<void*> pointers, size_t bytes, const void* pool, bool in_window = false);

  template <class T>
  void free(T*& pointer) {
    free(&pointer, &pointer + 1);
  }
  template <class T, size_t n>
  void free(std::array<T*, n>& pointers) {
    free(pointers.data(), pointers.data() + n);
  }
  void free(const void* first_pointer, const void* last_pointer);

  // What belonged to these streams is free for all.
  void join(const Streams& streams) { join(static_cast<const void*>(&streams)); }
  void join(const void* pool);

  // The bytes that all buffers together take, in windows and elsewhere.
  struct Bytes {
    size_t in_windows = 0, elsewhere = 0;
  };
  Bytes place();
  // Of the buffers in the order of their first allocation, and of these the places.
  std::span<const Lifetime> lifetimes() const { return lifetimes_; }
  std::span<const size_t> offsets() const { return offsets_; }
  // Once placed, sets every pointer to its place in this memory, or among these windows.
  void set_pointers(void* memory, void* windows = nullptr) const;

 private:
  int64_t now_ = 0;
  std::vector<void**> pointers_;
  std::vector<Lifetime> lifetimes_;
  std::vector<size_t> offsets_;
};

}  // namespace hw
