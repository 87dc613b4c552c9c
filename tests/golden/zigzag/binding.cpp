// Description of trained_in_zigzag for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::trained_in_zigzag;

namespace {

constexpr hw::Axis kAxes[] = {{"cp", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "cp", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "trained_in_zigzag",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
