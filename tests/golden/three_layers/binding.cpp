// Description of three_layers for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::three_layers;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "three_layers",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
