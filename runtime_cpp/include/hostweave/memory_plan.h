// Live ranges of a program's temporaries, recorded in program order. Buffers with disjoint live ranges may share bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hostweave/hidden.h"

namespace hw {

class Streams;

class MemoryPlan {
 public:
  MemoryPlan();

  // Begins the live range of a buffer. After `free`, the buffer may be allocated again, at the same offset.
  template <class T>
  void allocate(T*& pointer, int64_t count, bool in_window = false) {
    allocate(reinterpret_cast<void**>(&pointer), 1, count * sizeof(T), nullptr, in_window);
  }
  // Allocates one buffer per stream; `pointers` is a std::array.
  template <class Array>
  void allocate(Array& pointers, int64_t count, const Streams& streams, bool in_window = false) {
    allocate(reinterpret_cast<void**>(pointers.data()), pointers.size(), count * sizeof(*pointers[0]), &streams, in_window);
  }
  // Allocates one buffer, or one per stream, in a window.
  template <class Buffer, class... OfStreams>
  void allocate_window(Buffer& pointers, int64_t count, const OfStreams&... streams) {
    allocate(pointers, count, streams..., true);
  }
  // Allocates `bytes` bytes per pointer. With a pool, each pointer belongs to one stream of the pool.
  void allocate(void** pointers, size_t pointer_count, size_t bytes, const void* pool, bool in_window = false);

  template <class T>
  void free(T*& pointer) {
    free(&pointer, &pointer + 1);
  }
  template <class Array>
  void free(Array& pointers) {
    free(pointers.data(), pointers.data() + pointers.size());
  }
  void free(const void* first_pointer, const void* last_pointer);

  // Ends the live ranges of all buffers of these streams. Other streams may then reuse the bytes.
  void join(const Streams& streams) { join(static_cast<const void*>(&streams)); }
  void join(const void* pool);

  // Required bytes of memory in windows, and of other memory.
  struct Bytes {
    size_t in_windows = 0, elsewhere = 0;
  };
  Bytes place();
  // Sets the pointers of all buffers, given the base addresses of memory and windows. Call this function after `place`.
  void set_pointers(void* memory, void* windows = nullptr) const;

  struct Buffers;
  const Buffers& buffers() const { return *buffers_; }

 private:
  Hidden<Buffers> buffers_;
};

}  // namespace hw
