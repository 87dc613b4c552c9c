// The entry points of halves, as the binding calls them.
#include "hostweave/abi.h"
#include "program.h"

namespace programs::halves {
namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[part(M, x), 8]", CUDA_R_16BF, 2},
    {"w", "bf16[8, 3]", CUDA_R_16BF, 2},
};
constexpr hw::Argument kOutputs[] = {
    {"y0", "bf16[part(M, x), 11]", CUDA_R_16BF, 2},
    {"y1", "bf16[part(M, x), 3]", CUDA_R_16BF, 2},
};

Program& cast(void* program) { return *static_cast<Program*>(program); }

void* create(hw::Rank& rank) { return new Program(rank); }

void destroy(void* program) { delete &cast(program); }

void output_shapes(void* program, const hw::Tensor* tensors, hw::Shape* shapes) {
  const OutputShapes result = cast(program).output_shapes(hw::named<Inputs>(tensors));
  shapes[0] = result.y0;
  shapes[1] = result.y1;
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
}  // namespace programs::halves

using namespace programs::halves;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "halves",
    .mesh = kMesh,
    .world = kWorld,
    .n_axes = 1,
    .n_teams = 0,
    .axes = kAxes,
    .teams = nullptr,
    .n_inputs = 2,
    .n_outputs = 2,
    .inputs = kInputs,
    .outputs = kOutputs,
    .create = create,
    .destroy = destroy,
    .output_shapes = output_shapes,
    .prepare = prepare,
    .run = run,
    .arena = arena,
};
