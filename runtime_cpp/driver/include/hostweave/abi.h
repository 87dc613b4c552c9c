// Interface between the driver and a generated program. binding.cpp of the program defines one ProgramTable.
#pragma once
#include <cstring>
#include <type_traits>

#include "hostweave/channel.h"
#include "hostweave/tensor.h"

namespace hw {

class Rank;

// View of an array in a ProgramTable. With std::span, a binding takes twice as long to compile.
template <class T>
class List {
 public:
  constexpr List() = default;
  template <size_t n>
  constexpr List(const T (&items)[n]) : items_(items), size_(n) {}

  constexpr const T* begin() const { return items_; }
  constexpr const T* end() const { return items_ + size_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const T& operator[](size_t i) const { return items_[i]; }

 private:
  const T* items_ = nullptr;
  size_t size_ = 0;
};

struct Axis {
  const char* name;
  int64_t size;
};

// A channel along axes of the program's mesh, or of another mesh of the program.
struct MeshChannel {
  const char* mesh;          // "mesh(dp=2, tp=4)", "mesh(x=2 of ranks 2, 3)"
  const char* axes;          // axes along which the ranks of a process group differ: "dp, tp"
  List<Axis> mesh_axes;      // the last axis varies fastest
  List<int64_t> ranks = {};  // another mesh's ranks, numbered as in the program, in the order of their coordinates
  Transport transport = Transport::two_sided;
};

// Number and dtypes of a program's inputs or outputs.
struct Arguments {
  size_t count;
  void (*write)(Tensor* tensors);

  std::vector<Tensor> tensors() const {
    std::vector<Tensor> result(count);
    write(result.data());
    return result;
  }
};

// Entry points of a program.
struct Calls {
  Arguments inputs, outputs;
  void* (*create)(Rank& rank);  // creates streams, events and plans; finds this rank's channels
  void (*destroy)(void* program);
  // Checks dtypes and sizes of the inputs, allocates memory, prepares the plans, and returns the local output shapes. Every rank
  // prepares before any rank runs.
  void (*prepare)(void* program, const Tensor* inputs, Shape* outputs);
  // Enqueues the program, ordered with the work on `caller`. The tensors have the prepared dtypes and shapes, and memory.
  void (*enqueue)(void* program, const Tensor* inputs, const Tensor* outputs, cudaStream_t caller);
  // begin_call and end_call enclose the work of a call on `caller`; see CallOrder. `enqueue` calls both. The driver
  // calls both around a graph launch.
  cudaError_t (*begin_call)(void* program, cudaStream_t caller) = nullptr;
  cudaError_t (*end_call)(void* program, cudaStream_t caller) = nullptr;
  // Returns part `part` of the memory for temporaries, or null if there are fewer parts.
  void* (*arena)(void* program, size_t part, size_t* bytes);
};

struct ProgramTable {
  int abi;           // kAbi of the headers used to compile the program
  const char* name;  // name of the user's function
  const char* mesh;  // "mesh(dp=2, tp=4)"
  int world;         // number of ranks
  List<MeshChannel> channels;
  bool prepares_together = false;  // `prepare` is collective
  Calls calls;
};

constexpr int kAbi = 13;

// Copies an array of tensors to the Inputs or Outputs struct of a program. Code that initialises hundreds of members one by
// one would compile slowly.
template <class Named>
Named named(const Tensor* tensors) {
  static_assert(std::is_trivially_copyable_v<Named>);
  Named result;
  if constexpr (!std::is_empty_v<Named>) std::memcpy(&result, tensors, sizeof result);
  return result;
}

// Entry points of a program with these argument structs. Lambdas instead of these functions would compile more slowly.
template <class Program, class Inputs, class Outputs, class OutputShapes>
struct CallsOf {
  static_assert(std::is_trivially_copyable_v<OutputShapes>);

  template <class Named>
  static void write(Tensor* tensors) {
    const Named named;
    if constexpr (!std::is_empty_v<Named>) std::memcpy(static_cast<void*>(tensors), &named, sizeof named);
  }
  static void* create(Rank& rank) { return new Program(rank); }
  static void destroy(void* program) { delete static_cast<Program*>(program); }
  static void prepare(void* program, const Tensor* inputs, Shape* outputs) {
    const OutputShapes shapes = static_cast<Program*>(program)->prepare(named<Inputs>(inputs));
    if constexpr (!std::is_empty_v<OutputShapes>) std::memcpy(static_cast<void*>(outputs), &shapes, sizeof shapes);
  }
  static void enqueue(void* program, const Tensor* inputs, const Tensor* outputs, cudaStream_t caller) {
    static_cast<Program*>(program)->enqueue(named<Inputs>(inputs), named<Outputs>(outputs), caller);
  }
  static cudaError_t begin_call(void* program, cudaStream_t caller) {
    return static_cast<Program*>(program)->arena().begin_call(caller);
  }
  static cudaError_t end_call(void* program, cudaStream_t caller) {
    return static_cast<Program*>(program)->arena().end_call(caller);
  }
  static void* arena(void* program, size_t part, size_t* bytes) {
    return static_cast<Program*>(program)->arena().part(part, bytes);
  }
  template <class Named>
  static constexpr Arguments arguments = {std::is_empty_v<Named> ? 0 : sizeof(Named) / sizeof(Tensor), write<Named>};
  static constexpr Calls calls{arguments<Inputs>, arguments<Outputs>, create,   destroy, prepare,
                               enqueue,           begin_call,         end_call, arena};
};

}  // namespace hw

extern "C" const hw::ProgramTable hw_program_table;
