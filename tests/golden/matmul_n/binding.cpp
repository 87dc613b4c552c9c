// Description of matmul_n for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_n;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_n",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
