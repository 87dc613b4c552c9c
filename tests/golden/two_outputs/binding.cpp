// Description of two_outputs for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_outputs;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_outputs",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
