// What the binding knows of add.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::add;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};
constexpr hw::Argument kInputs[] = {
    {"a", "bf16[M, N]", CUDA_R_16BF},
    {"b", "bf16[M, N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "add",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
