// Description of halves for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::halves;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "halves",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
