// Description of add for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::add;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "add",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
