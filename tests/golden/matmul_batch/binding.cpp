// Description of matmul_batch for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_batch;

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_batch",
    .mesh = kMesh,
    .world = kWorld,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
