// Description of matmul_m for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_m;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_m",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
