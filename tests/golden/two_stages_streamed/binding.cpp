// Description of two_stages_streamed for the Python binding.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::two_stages_streamed;

namespace {

constexpr hw::Axis kAxes[] = {{"x", 4}};
constexpr hw::Axis kAxes1[] = {{"x", 2}};
constexpr int64_t kRanks1[] = {0, 1};
constexpr hw::Axis kAxes2[] = {{"x", 2}};
constexpr int64_t kRanks2[] = {2, 3};
constexpr hw::MeshChannel kChannels[] = {
    {kMesh, "x", kAxes, {}},
    {"mesh(x=2 of ranks 0, 1)", "x", kAxes1, kRanks1},
    {"mesh(x=2 of ranks 2, 3)", "x", kAxes2, kRanks2},
};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "two_stages_streamed",
    .mesh = kMesh,
    .world = kWorld,
    .channels = kChannels,
    .calls = hw::CallsOf<Program, Inputs, Outputs, OutputShapes>::calls,
};
