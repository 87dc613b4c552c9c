// What the binding knows of two_outputs.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_outputs;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[local(M, x), N]", CUDA_R_16BF},
    {"b", "bf16[N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[local(M, x), N]", CUDA_R_16BF},
    {"z", "bf16[local(M, x)]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_outputs",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
