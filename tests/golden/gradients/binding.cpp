// What the binding knows of gradients.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::gradients;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[local(T, x), K]", CUDA_R_16BF},
    {"dy", "bf16[local(T, x), N]", CUDA_R_16BF},
    {"w", "bf16[K, N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"dx", "bf16[local(T, x), K]", CUDA_R_16BF},
    {"dw", "bf16[K, N]", CUDA_R_16BF},
    {"db", "bf16[N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "gradients",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
