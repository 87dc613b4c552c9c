// Description of row_sum for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::row_sum;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "row_sum",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
