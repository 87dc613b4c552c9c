// Description of three_ops for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::three_ops;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "three_ops",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
