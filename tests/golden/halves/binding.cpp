// Description of halves for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::halves;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "halves",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
