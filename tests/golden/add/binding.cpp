// Description of add for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::add;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 1}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "add",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
