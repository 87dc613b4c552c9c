// What the binding knows of three_layers.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::three_layers;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M, E]", CUDA_R_16BF},
    {"w_in_0", "bf16[E, local(F, x)]", CUDA_R_16BF},
    {"w_out_0", "bf16[local(F, x), E]", CUDA_R_16BF},
    {"w_in_1", "bf16[E, local(F, x)]", CUDA_R_16BF},
    {"w_out_1", "bf16[local(F, x), E]", CUDA_R_16BF},
    {"w_in_2", "bf16[E, local(F, x)]", CUDA_R_16BF},
    {"w_out_2", "bf16[local(F, x), E]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M/4, E]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "three_layers",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
