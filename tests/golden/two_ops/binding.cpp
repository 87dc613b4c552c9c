// Description of two_ops for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_ops;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_ops",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
