// Description of set for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::set;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "set",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
