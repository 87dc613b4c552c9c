// What the binding knows of matmul_ar_unstreamed.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_ar_unstreamed;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr const char* kChannels[] = {"x"};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M, local(K, x)]", CUDA_R_16BF},
    {"w", "bf16[local(K, x), N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_unstreamed",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .channels = kChannels,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
