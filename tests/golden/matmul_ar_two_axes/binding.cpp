// Description of matmul_ar_two_axes for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_ar_two_axes;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 2}, {"tp", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "tp", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_ar_two_axes",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
