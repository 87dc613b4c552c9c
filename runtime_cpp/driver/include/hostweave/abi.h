// What the binding knows of a generated program: one table of entry points. binding.cpp of a program defines it.
#pragma once
#include <cstring>
#include <type_traits>

#include "hostweave/tensor.h"

namespace hw {

class Rank;

struct Argument {
  const char* name;
  const char* type;  // "bf16[M/8, K]", for messages
  cudaDataType_t dtype;
  int ndim;
};

struct Axis {
  const char* name;
  int64_t size;
};

// A channel along axes of a mesh of some of the program's ranks.
struct SubmeshTeam {
  const char* mesh;  // "mesh(x=2 of ranks 2, 3)"
  const char* axes;  // along which the ranks of the team differ: "x"
  int n_axes;
  const Axis* mesh_axes;
  int n_ranks;
  const int64_t* ranks;  // of the program, in the order of their coordinates
};

struct ProgramTable {
  int abi;           // kAbi of the headers that the program was compiled against
  const char* name;  // the user's name of the program
  const char* mesh;  // "mesh(dp=2, tp=4)"
  int world;         // how many ranks the program is for
  int n_axes, n_teams;
  const Axis* axes;          // of the mesh, the last one fastest
  const char* const* teams;  // which channels the program uses, by the axes of their teams: "tp", or "dp, tp"
  int n_inputs, n_outputs;
  const Argument* inputs;
  const Argument* outputs;

  void* (*create)(Rank& rank);  // streams, events and channels of this rank
  void (*destroy)(void* program);
  // Checks dtypes and sizes of the inputs and gives the local shapes of the outputs. Enqueues nothing.
  void (*output_shapes)(void* program, const Tensor* inputs, Shape* outputs);
  // Allocates and plans for these shapes; every rank prepares before any rank runs.
  void (*prepare)(void* program, const Tensor* inputs);
  // Only enqueues. Ordered after what `caller` holds, and `caller` is ordered after it.
  void (*run)(void* program, const Tensor* inputs, const Tensor* outputs, cudaStream_t caller);
  // The memory that the program allocated for its temporaries; tests fill it with NaN before a call. Null before prepare.
  void* (*arena)(void* program, size_t* bytes);

  int n_submesh_teams = 0;
  const SubmeshTeam* submesh_teams = nullptr;
};

constexpr int kAbi = 2;

// An array of tensors under the names of a program's Inputs or Outputs, a struct of as many. Compilers take long over a list of
// hundreds of them.
template <class Named>
Named named(const Tensor* tensors) {
  static_assert(std::is_trivially_copyable_v<Named>);
  Named result;
  if constexpr (!std::is_empty_v<Named>) std::memcpy(&result, tensors, sizeof result);
  return result;
}

}  // namespace hw

extern "C" const hw::ProgramTable hw_program_table;
