// What the binding knows of weights_by_columns.
#include "hostweave/abi.h"
#include "program.h"

using namespace programs::weights_by_columns;

namespace {

constexpr hw::Axis kAxes[] = {{"dp", 4}};
constexpr const char* kOneSidedChannels[] = {"dp"};

}  // namespace

const hw::ProgramTable hw_program_table = {
    .abi = hw::kAbi,
    .name = "weights_by_columns",
    .mesh = kMesh,
    .world = kWorld,
    .axes = kAxes,
    .one_sided_channels = kOneSidedChannels,
    .prepares_together = true,
    .calls = hw::calls_of<Program, Inputs, Outputs, OutputShapes>(),
};
