// The entry points of two_stages, as the binding calls them.
#include "hostweave/abi.h"
#include "program.h"

namespace programs::two_stages {
namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kTeams[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[part(M, x on ranks 0, 1), K]", CUDA_R_16BF, 2},
    {"w1", "bf16[K, N]", CUDA_R_16BF, 2},
    {"w2", "bf16[N, K]", CUDA_R_16BF, 2},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[part(M, x on ranks 2, 3), K]", CUDA_R_16BF, 2},
};

Program& cast(void* program) { return *static_cast<Program*>(program); }

void* create(hw::Rank& rank) { return new Program(rank); }

void destroy(void* program) { delete &cast(program); }

void output_shapes(void* program, const hw::Tensor* tensors, hw::Shape* shapes) {
  const OutputShapes result = cast(program).output_shapes(hw::named<Inputs>(tensors));
  shapes[0] = result.y;
}

void prepare(void* program, const hw::Tensor* tensors) { cast(program).prepare(hw::named<Inputs>(tensors)); }

void run(void* program, const hw::Tensor* in, const hw::Tensor* out, cudaStream_t caller) {
  cast(program).run(hw::named<Inputs>(in), hw::named<Outputs>(out), caller);
}

void* arena(void* program, size_t* bytes) {
  *bytes = cast(program).arena().bytes();
  return cast(program).arena().data();
}

}  // namespace
}  // namespace programs::two_stages

using namespace programs::two_stages;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_stages",
    .mesh = kMesh,
    .world = kWorld,
    .n_axes = 1,
    .n_teams = 1,
    .axes = kAxes,
    .teams = kTeams,
    .n_inputs = 3,
    .n_outputs = 1,
    .inputs = kInputs,
    .outputs = kOutputs,
    .create = create,
    .destroy = destroy,
    .output_shapes = output_shapes,
    .prepare = prepare,
    .run = run,
    .arena = arena,
};
