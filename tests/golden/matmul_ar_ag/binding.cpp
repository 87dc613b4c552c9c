// What the binding knows of matmul_ar_ag.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_ar_ag;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 2}, {"tp", 4}};
constexpr const char* kChannels[] = {"tp", "dp"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M/2, local(K, tp)]", CUDA_R_16BF},
    {"w", "bf16[local(K, tp), N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_ag",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
