// When a program's temporaries come and go, told in the order of the program. What is free lends its bytes to what comes next.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
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
  std::vector<Use> uses;  // one after another
};

// Offsets for all buffers, multiples of 256 bytes: no two that are in use at once overlap. Returns the bytes that this takes.
size_t place(std::span<const Lifetime> buffers, std::span<size_t> offsets);

class MemoryPlan {
 public:
  // A buffer that has been freed may be allocated again: it is the same one then.
  template <class T>
  void allocate(T*& pointer, int64_t count) {
    add(pointer, {.bytes = count * sizeof(T)});
    ++now_;
  }
  // A buffer for each of these streams.
  template <class T, size_t n>
  void allocate(std::array<T*, n>& pointers, int64_t count, const Streams& streams) {
    for (size_t i = 0; i < n; ++i) {
      add(pointers[i], {.bytes = count * sizeof(T), .pool = &streams, .stream = static_cast<int64_t>(i)});
    }
    ++now_;
  }

  template <class T>
  void free(T*& pointer) {
    end(&pointer, &pointer + 1);
  }
  template <class T, size_t n>
  void free(std::array<T*, n>& pointers) {
    end(pointers.data(), pointers.data() + n);
  }

  // What belonged to these streams is free for all.
  void join(const Streams& streams);

  // The bytes that all buffers together take.
  size_t place();
  // Once placed, sets every pointer to its place in this memory.
  void set_pointers(void* memory) const;

 private:
  template <class T>
  void add(T*& pointer, Lifetime lifetime) {
    begin(reinterpret_cast<void**>(&pointer), std::move(lifetime));
  }
  void begin(void** pointer, Lifetime lifetime);
  void end(const void* first_pointer, const void* last_pointer);

  int64_t now_ = 0;
  std::vector<void**> pointers_;
  std::vector<Lifetime> lifetimes_;
  std::vector<size_t> offsets_;
};

}  // namespace hw
