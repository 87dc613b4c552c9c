// The entry points of matmul_ar_ag, as the binding calls them.
#include "hostweave/abi.h"
#include "program.h"

namespace programs::matmul_ar_ag {
namespace {

constexpr hw::Axis kAxes[] = {{"dp", 2}, {"tp", 4}};
constexpr const char* kTeams[] = {"tp", "dp"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M/2, part(K, tp)]", CUDA_R_16BF, 2},
    {"w", "bf16[part(K, tp), N]", CUDA_R_16BF, 2},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M, N]", CUDA_R_16BF, 2},
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
}  // namespace programs::matmul_ar_ag

using namespace programs::matmul_ar_ag;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_ag",
    .mesh = kMesh,
    .world = kWorld,
    .n_axes = 2,
    .n_teams = 2,
    .axes = kAxes,
    .teams = kTeams,
    .n_inputs = 2,
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
