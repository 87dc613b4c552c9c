// Description of matmul_ar_flat for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_ar_flat;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_flat",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
