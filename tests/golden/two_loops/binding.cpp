// What the binding knows of two_loops.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_loops;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M/4, K]", CUDA_R_16BF},
    {"w", "bf16[K, N]", CUDA_R_16BF},
    {"v", "bf16[N, local(F, x)]", CUDA_R_16BF},
    {"u", "bf16[local(F, x), N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M/4, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_loops",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
