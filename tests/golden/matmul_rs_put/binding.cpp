// What the binding knows of matmul_rs_put.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_rs_put;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kOneSidedChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M, K/4]", CUDA_R_16BF},
    {"w", "bf16[K/4, N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M/4, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_rs_put",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .one_sided_channels = kOneSidedChannels,
    .prepares_together = true,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
