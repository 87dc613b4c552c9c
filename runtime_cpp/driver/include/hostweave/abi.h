// What the binding knows of a generated program: one table of entry points. binding.cpp of a program defines it.
#pragma once
#include <cstring>
#include <type_traits>

#include "hostweave/channel.h"
#include "hostweave/tensor.h"

namespace hw {

class Rank;

// An array of what a program's table lists. Compilers take as long over a std::span as over the rest of a binding.
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

// A channel along axes of the program's mesh, such as "tp" or "dp, tp".
struct MeshChannel {
  const char* axes;
  Transport transport = Transport::two_sided;
};

// A channel along axes of a mesh of some of the program's ranks.
struct SubmeshChannel {
  const char* mesh;  // "mesh(x=2 of ranks 2, 3)"
  const char* axes;  // along which the ranks of the process group differ: "x"
  List<Axis> mesh_axes;
  List<int64_t> ranks;  // of the program, in the order of their coordinates
  Transport transport = Transport::two_sided;
};

// What a program takes, or gives: tensors of its dtypes.
struct Arguments {
  size_t count;
  void (*write)(Tensor* tensors);

  template <class Vector>
  Vector in() const {
    Vector tensors(count);
    write(tensors.data());
    return tensors;
  }
};

// What can be done with a program.
struct Calls {
  Arguments inputs, outputs;
  void* (*create)(Rank& rank);  // streams, events and channels of this rank
  void (*destroy)(void* program);
  // Checks dtypes and sizes of the inputs, allocates and plans for them, and gives the local shapes of the outputs. Enqueues
  // nothing. Every rank prepares before any rank runs.
  void (*prepare)(void* program, const Tensor* inputs, Shape* outputs);
  // Only enqueues, for inputs as they were prepared. Ordered after what `caller` holds, and `caller` is ordered after it.
  void (*run)(void* program, const Tensor* inputs, const Tensor* outputs, cudaStream_t caller);
  // The work of a call of the program stands between these two on `caller`, as of CallOrder; `run` enqueues them, too.
  cudaError_t (*begin_call)(void* program, cudaStream_t caller) = nullptr;
  cudaError_t (*end_call)(void* program, cudaStream_t caller) = nullptr;
  // Of the memory that the program allocated for its temporaries a part, or nothing; tests fill it with NaN before a call.
  void* (*arena)(void* program, size_t part, size_t* bytes);
};

struct ProgramTable {
  int abi;           // kAbi of the headers that the program was compiled against
  const char* name;  // the user's name of the program
  const char* mesh;  // "mesh(dp=2, tp=4)"
  int world;         // how many ranks the program is for
  List<Axis> axes;   // of the mesh, the last one fastest
  List<MeshChannel> channels;
  List<SubmeshChannel> submesh_channels;
  bool prepares_together = false;  // ranks wait for one another when they prepare
  Calls calls;
};

constexpr int kAbi = 12;

// An array of tensors under the names of a program's Inputs or Outputs, a struct of as many. Compilers take long over a list of
// hundreds of them.
template <class Named>
Named named(const Tensor* tensors) {
  static_assert(std::is_trivially_copyable_v<Named>);
  Named result;
  if constexpr (!std::is_empty_v<Named>) std::memcpy(&result, tensors, sizeof result);
  return result;
}

// The tensors of such a struct.
template <class Named>
constexpr Arguments arguments_of() {
  if constexpr (std::is_empty_v<Named>) return {0, [](Tensor*) {}};
  return {sizeof(Named) / sizeof(Tensor), [](Tensor* tensors) {
            const Named named;
            std::memcpy(static_cast<void*>(tensors), &named, sizeof named);
          }};
}

// The calls of a program, given its class and the structs of its arguments.
template <class Program, class Inputs, class Outputs, class OutputShapes>
constexpr Calls calls_of() {
  static_assert(std::is_trivially_copyable_v<OutputShapes>);
  return {
      .inputs = arguments_of<Inputs>(),
      .outputs = arguments_of<Outputs>(),
      .create = [](Rank& rank) -> void* { return new Program(rank); },
      .destroy = [](void* program) { delete static_cast<Program*>(program); },
      .prepare =
          [](void* program, const Tensor* inputs, Shape* outputs) {
            const OutputShapes shapes = static_cast<Program*>(program)->prepare(named<Inputs>(inputs));
            if constexpr (!std::is_empty_v<OutputShapes>) std::memcpy(static_cast<void*>(outputs), &shapes, sizeof shapes);
          },
      .run =
          [](void* program, const Tensor* inputs, const Tensor* outputs, cudaStream_t caller) {
            static_cast<Program*>(program)->run(named<Inputs>(inputs), named<Outputs>(outputs), caller);
          },
      .begin_call = [](void* program, cudaStream_t caller) { return static_cast<Program*>(program)->arena().begin_call(caller); },
      .end_call = [](void* program, cudaStream_t caller) { return static_cast<Program*>(program)->arena().end_call(caller); },
      .arena = [](void* program, size_t part, size_t* bytes) -> void* {
        void* found = nullptr;
        static_cast<Program*>(program)->arena().each_memory([&](void* memory, size_t size) {
          if (size == 0 || part-- != 0) return;
          found = memory;
          *bytes = size;
        });
        return found;
      },
  };
}

}  // namespace hw

extern "C" const hw::ProgramTable hw_program_table;
