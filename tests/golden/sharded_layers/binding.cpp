// Description of sharded_layers for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::sharded_layers;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "dp", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "sharded_layers",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
