// What the binding knows of matmul_ar_two_axes.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_ar_two_axes;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 2}, {"tp", 4}};
constexpr const char* kChannels[] = {"tp"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[local(M, dp), local(K, tp)]", CUDA_R_16BF},
    {"w", "bf16[local(K, tp), N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[local(M, dp), N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_two_axes",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
