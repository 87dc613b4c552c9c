// Description of two_ops for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_ops;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_ops",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
