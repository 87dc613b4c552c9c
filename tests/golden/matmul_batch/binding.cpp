// Description of matmul_batch for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_batch;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_batch",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
