// Description of matmul_rs_put for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::matmul_rs_put;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}, hw::Transport::peer},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "matmul_rs_put",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .prepares_together = true,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
