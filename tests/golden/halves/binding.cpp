// What the binding knows of halves.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::halves;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[local(M, x), 8]", CUDA_R_16BF},
    {"w", "bf16[8, 3]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"joined", "bf16[local(M, x), 11]", CUDA_R_16BF},
    {"relu_x_padded", "bf16[local(M, x), 3]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "halves",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
