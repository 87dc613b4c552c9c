// What the binding knows of gated_in_loops.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::gated_in_loops;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M/4, K]", CUDA_R_16BF},
    {"gate", "bf16[K, local(F, x)]", CUDA_R_16BF},
    {"up", "bf16[K, local(F, x)]", CUDA_R_16BF},
    {"down", "bf16[local(F, x), K]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M/4, K]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "gated_in_loops",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
