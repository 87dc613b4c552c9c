// Description of in_zigzag for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::in_zigzag;

namespace {

constexpr hw::Axis kAxes[] = {{"cp", 2}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "cp", kAxes, {}, hw::Transport::peer},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "in_zigzag",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .prepares_together = true,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
