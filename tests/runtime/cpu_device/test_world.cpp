// Worlds as they are on GPUs, where nobody but the driver sees that ranks stand still: world_cuda.cpp on the CPU device.
#include <chrono>
#include <numeric>
#include <thread>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/runner.h"
#include "testing.h"

namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3, kCount = 4;
int silent = -1;      // a rank that sends nothing
bool blocks = false;  // and does not return either, until its channel is aborted

// y of a rank is x of the one before.
struct Pass {
  hw::Rank& rank;

  void run(const hw::Tensor& x, const hw::Tensor& y, cudaStream_t caller) {
    const hw::Channel& channel = rank.channel("mesh(x=3)", "x", kRanks);
    const int me = static_cast<int>(rank.index());
    HW_CHECK(ncclGroupStart());
    if (me != silent) HW_CHECK(ncclSend(x.data, kCount, ncclFloat32, (me + 1) % kRanks, channel.comm(), caller));
    HW_CHECK(ncclRecv(y.data, kCount, ncclFloat32, (me + 2) % kRanks, channel.comm(), caller));
    HW_CHECK(ncclGroupEnd());
    while (me == silent && blocks && !hw_cpu_failed()) std::this_thread::sleep_for(10ms);
  }
};

constexpr hw::Axis kAxes[] = {{"x", kRanks}};
constexpr const char* kChannels[] = {"x"};
const hw::ProgramTable kProgram{.abi = hw::kAbi,
                                .name = "pass",
                                .mesh = "mesh(x=3)",
                                .world = kRanks,
                                .axes = kAxes,
                                .channels = kChannels,
                                .submesh_channels = {},
                                .calls = {.inputs = {1, [](hw::Tensor*) {}},
                                          .outputs = {1, [](hw::Tensor*) {}},
                                          .create = [](hw::Rank& rank) -> void* { return new Pass{rank}; },
                                          .destroy = [](void* program) { delete static_cast<Pass*>(program); },
                                          .output_shapes = [](void*, const hw::Tensor* x, hw::Shape* y) { *y = x->shape; },
                                          .prepare = [](void*, const hw::Tensor*) {},
                                          .run = [](void* program, const hw::Tensor* x, const hw::Tensor* y,
                                                    cudaStream_t caller) { static_cast<Pass*>(program)->run(*x, *y, caller); },
                                          .arena = [](void*, size_t, size_t* bytes) -> void* { return *bytes = 0, nullptr; }}};

hw::Array array_of(float* data, int device) {
  hw::Array array;
  array.data = data;
  array.shape.dims[array.shape.ndim++] = kCount;
  array.bytes = kCount * sizeof(float);
  array.device = device;
  return array;
}

// Calls that pass on what host arrays hold.
struct Calls {
  std::vector<float> x, y;
  std::vector<hw::Call> calls;

  explicit Calls(int count) : x(count * kRanks * kCount), y(x.size()), calls(count) {
    std::iota(x.begin(), x.end(), 0.0f);
    for (size_t at = 0, c = 0; c < calls.size(); ++c) {
      for (int r = 0; r < kRanks; ++r, at += kCount) {
        calls[c].inputs.push_back({array_of(&x[at], -1)});
        calls[c].outputs.push_back({array_of(&y[at], -1)});
      }
    }
  }
};

std::string message_of(hw::Runner& runner, const Calls& calls, const hw::GiveUp& give_up = {}) {
  hw::Schedule schedule;
  schedule.timeout_seconds = 0.5;
  try {
    runner.run(schedule, calls.calls, false, give_up);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// What a world says whose rank 1 sends nothing; it ends soon, and so does the world.
std::string report_of(bool rank_blocks, int calls, const hw::GiveUp& give_up = {}) {
  testing::configure(testing::config_of(HW_CPU_PARALLEL, kRanks));
  hw::World world(kRanks);
  hw::Runner runner(world, kProgram);
  EXPECT(message_of(runner, Calls(2)).empty());
  silent = 1, blocks = rank_blocks;
  const auto begin = std::chrono::steady_clock::now();
  const std::string report = message_of(runner, Calls(calls), give_up);
  silent = -1, blocks = false;
  EXPECT(world.broken());
  EXPECT(std::chrono::steady_clock::now() - begin < 6s);
  return report;
}

}  // namespace

TEST(ranks_that_stand_still_are_reported) {
  EXPECT_IN(
      "no rank has come further for 1 seconds\n  rank 0: 1 of 2 calls enqueued, not done\n"
      "  rank 1: 2 of 2 calls enqueued, all done\n  rank 2: 0 of 2 calls enqueued, not done",
      report_of(false, 2));
}

TEST(a_rank_that_stands_still_inside_a_call_is_reported) {
  EXPECT_IN("  rank 1: 0 of 2 calls enqueued, not done", report_of(true, 2));
}

TEST(whoever_waits_can_give_up) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT(report_of(false, 20, [&] { return std::chrono::steady_clock::now() - begin > 500ms; }) == "interrupted");
}

// Were they copied between the calls, a copy could wait for a rank that waits for the copy of another one.
TEST(inputs_on_other_devices_are_fetched_before_the_first_call) {
  testing::configure(testing::config_of(HW_CPU_PARALLEL, kRanks));
  hw::World world(kRanks);
  hw::Runner runner(world, kProgram);
  OK(cudaSetDevice(0));
  const testing::Stream stream;
  std::vector<std::unique_ptr<testing::Buffer<>>> x, y;
  for (int r = 0; r < kRanks; ++r) {
    x.push_back(std::make_unique<testing::Buffer<>>(kCount));
    OK(testing::set(*x[r], static_cast<float>(r), kCount, stream));
    OK(cudaSetDevice(r));
    y.push_back(std::make_unique<testing::Buffer<>>(kCount));
    OK(cudaSetDevice(0));
  }
  OK(cudaStreamSynchronize(stream));
  hw::Call first, second;
  for (int r = 0; r < kRanks; ++r) {
    first.inputs.push_back({array_of(*x[r], 0)});
    first.outputs.push_back({array_of(r == 0 ? *x[1] : *y[r], r)});  // what the second call finds on device 0 if it looks late
    second.inputs.push_back({array_of(*x[r], 0)});
    second.outputs.push_back({array_of(*y[r], r)});
  }
  runner.run({}, {first, second}, false);
  for (int r = 0; r < kRanks; ++r) {
    OK(cudaSetDevice(r));
    const testing::Stream own;
    EXPECT(testing::fetch<float>(*y[r], kCount, own) == std::vector<float>(kCount, static_cast<float>((r + 2) % kRanks)));
  }
  OK(cudaSetDevice(0));
}

int main(int argc, char** argv) { return testing::main(argc, argv); }
