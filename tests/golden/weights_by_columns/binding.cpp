// Description of weights_by_columns for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::weights_by_columns;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "dp", kAxes, {}, hw::Transport::peer},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "weights_by_columns",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .prepares_together = true,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
