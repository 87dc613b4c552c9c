// Description of matmul_n for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_n;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_n",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
