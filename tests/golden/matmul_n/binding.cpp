// What the binding knows of matmul_n.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_n;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};
constexpr hw::Argument kInputs[] = {
    {"x", "bf16[M, K]", CUDA_R_16BF},
    {"w", "bf16[K, N]", CUDA_R_16BF},
};
constexpr hw::Argument kOutputs[] = {
    {"y", "bf16[M, N]", CUDA_R_16BF},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_n",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .inputs = kInputs,
    .outputs = kOutputs,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
