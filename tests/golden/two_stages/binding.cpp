// What the binding knows of two_stages.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_stages;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[local(M, x on ranks 0, 1), K]", CUDA_R_16BF},
    {"w1", "bf16[K, N]", CUDA_R_16BF},
    {"w2", "bf16[N, K]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[local(M, x on ranks 2, 3), K]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_stages",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
