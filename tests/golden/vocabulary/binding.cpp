// Description of vocabulary for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::vocabulary;

namespace {

constexpr hw::Axis kAxes[] = {{"tp", 4}};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "tp", kAxes, {}},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "vocabulary",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
