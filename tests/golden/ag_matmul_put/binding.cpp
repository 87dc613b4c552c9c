// Description of ag_matmul_put for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::ag_matmul_put;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}, hw::Transport::peer},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "ag_matmul_put",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .prepares_together = true,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
