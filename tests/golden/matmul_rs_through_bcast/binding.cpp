// Description of matmul_rs_through_bcast for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_rs_through_bcast;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_rs_through_bcast",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
