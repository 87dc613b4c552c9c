// Description of row_sum for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::row_sum;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "row_sum",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
