// What the binding knows of epilogues.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::epilogues;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M/4, K]", CUDA_R_16BF},
    {"w", "bf16[K, N]", CUDA_R_16BF},
    {"b", "bf16[N]", CUDA_R_16BF},
    {"r", "bf16[M/4, N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"h", "bf16[M, N]", CUDA_R_16BF},
    {"s", "bf16[M/4, N]", CUDA_R_16BF},
    {"c", "bf16[M/4, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "epilogues",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
