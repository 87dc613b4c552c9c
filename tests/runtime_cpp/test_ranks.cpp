// Compiles target_cuda.cpp for the CPU device, to test ranks as on GPUs. On GPUs, only the watchdog can detect a hang.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/instance.h"
#include "target.h"
#include "testing.h"

namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3, kCount = 4;
int silent = -1;      // a rank that sends nothing
bool blocks = false;  // true if the silent rank also blocks until its channel is aborted

// A program that copies x of each rank to y of the next rank.
struct Pass {
  hw::Rank& rank;

  static hw::Shape prepare(const hw::Shape& x) { return x == hw::Shape{kCount} ? x : throw hw::ArgumentError("a wrong shape"); }
  void enqueue(const hw::Tensor& x, const hw::Tensor& y, cudaStream_t caller) {
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
constexpr hw::MeshChannel kChannels[] = {{"mesh(x=3)", "x", kAxes}};
const hw::ProgramTable kProgram{
    .abi = hw::kAbi,
    .name = "pass",
    .mesh = "mesh(x=3)",
    .world = kRanks,
    .channels = kChannels,
    .calls = {.inputs = {1, [](hw::Tensor*) {}},
              .outputs = {1, [](hw::Tensor*) {}},
              .create = [](hw::Rank& rank) -> void* { return new Pass{rank}; },
              .destroy = [](void* program) { delete static_cast<Pass*>(program); },
              .prepare = [](void*, const hw::Tensor* x, hw::Shape* y) { *y = Pass::prepare(x->shape); },
              .enqueue = [](void* program, const hw::Tensor* x, const hw::Tensor* y,
                            cudaStream_t caller) { static_cast<Pass*>(program)->enqueue(*x, *y, caller); },
              .arena = [](void*, size_t, size_t* bytes) -> void* { return *bytes = 0, nullptr; }}};

// Instances of the program on all ranks.
struct Ranks {
  std::vector<std::unique_ptr<hw::Member>> members;
  std::vector<std::unique_ptr<hw::Instance>> instances;
  std::vector<std::unique_ptr<hw::Staging>> staged;

  Ranks() : members(kRanks), instances(kRanks), staged(kRanks) {
    testing::configure(testing::config_of(HW_CPU_PARALLEL, kRanks));
    static int groups = 0;
    const std::string group = "group " + std::to_string(groups++);
    std::map<std::string, ncclUniqueId> ids;
    for (int r = 0; r < kRanks; ++r) {
      members[r] = std::make_unique<hw::Member>(group, r, r, kRanks, false);
      for (const hw::ProcessGroup& one : members[r]->missing_process_groups(kProgram))
        if (!ids.contains(one.key)) ids[one.key] = members[r]->new_process_group_id(kProgram, one.key);
    }
    const auto make = [&](int r) {
      members[r]->connect(kProgram, ids, 10);
      instances[r] = std::make_unique<hw::Instance>(*members[r], kProgram);
      prepare(r, kCount);
      staged[r] = std::make_unique<hw::Staging>(*members[r]);
    };
    for (const std::string& error : each(make)) EXPECT(error.empty());
  }
  ~Ranks() {
    staged.clear();
    instances.clear();
  }

  // Error that `work` throws on each rank. `meanwhile` runs concurrently.
  std::array<std::string, kRanks> each(const std::function<void(int)>& work, const std::function<void()>& meanwhile = [] {}) {
    std::array<std::string, kRanks> errors;
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) {
      threads.emplace_back([&, r] {
        try {
          work(r);
        } catch (const std::exception& error) {
          errors[r] = error.what();
        }
      });
    }
    meanwhile();
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  void prepare(int rank, int64_t count) { instances[rank]->prepare({{.shape = {count}, .global_shape = {}}}, nullptr); }

  double waiting(int rank) { return instances[rank]->progress().waiting_seconds; }

  void abort() {
    std::vector<std::thread> threads;
    for (const auto& member : members) threads.emplace_back([&] { member->abort("given up"); });
    for (std::thread& thread : threads) thread.join();
  }
};

hw::Array array_of(float* data, int device) { return {data, kCount * sizeof(float), device}; }

// `count` calls of each rank on host arrays.
struct Calls {
  std::vector<float> x, y;
  std::array<std::vector<hw::Staging::Call>, kRanks> of_rank;

  explicit Calls(int count) : x(count * kRanks * kCount), y(x.size()) {
    std::iota(x.begin(), x.end(), 0.0f);
    for (size_t at = 0; at < x.size(); at += kCount)
      of_rank[at / kCount % kRanks].push_back({{array_of(&x[at], -1)}, {array_of(&y[at], -1)}});
  }
};

// Rank 1 sends nothing. Progress shows that rank 2 waits. All calls end soon after an abort.
void expect_an_end(bool rank_blocks) {
  Ranks ranks;
  Calls calls(2);
  const auto prepare = [&](int r) { ranks.staged[r]->place(calls.of_rank[r]); };
  const auto run = [&](int r) { ranks.instances[r]->run_staged({}, *ranks.staged[r], false); };
  for (const auto& work : {std::function<void(int)>(prepare), std::function<void(int)>(run)})
    for (const std::string& error : ranks.each(work)) EXPECT(error.empty());
  const std::vector<float> last(calls.x.end() - kCount, calls.x.end());
  EXPECT(std::equal(last.begin(), last.end(), calls.y.end() - kRanks * kCount));
  silent = 1, blocks = rank_blocks;
  auto given_up = std::chrono::steady_clock::time_point();
  const auto errors = ranks.each(run, [&] {
    while (ranks.waiting(2) < 0.3) std::this_thread::sleep_for(10ms);
    EXPECT(ranks.instances[2]->progress().done == 2);  // These are the two calls of the first round.
    given_up = std::chrono::steady_clock::now();
    ranks.abort();
  });
  silent = -1, blocks = false;
  EXPECT(std::chrono::steady_clock::now() - given_up < 6s);
  EXPECT(!errors[2].empty());
}

}  // namespace

TEST(ranks_that_stand_still_can_be_given_up) { expect_an_end(false); }

TEST(a_rank_that_stands_still_inside_a_call_can_be_given_up) { expect_an_end(true); }

// NCCL waits until graphs are destroyed. An abort must not wait, because the owner of the graphs may not know of the abort.
TEST(ranks_that_have_graphs_can_be_given_up) {
  Ranks ranks;
  float at = 0;
  std::array<std::unique_ptr<hw::Graph>, kRanks> graphs;
  const hw::Table table{{std::nullopt}};
  for (const std::string& error : ranks.each([&](int r) { graphs[r] = ranks.instances[r]->capture(table, {&at}, {&at}); }))
    EXPECT(error.empty());
  const auto begun = std::chrono::steady_clock::now();
  ranks.abort();
  EXPECT(std::chrono::steady_clock::now() - begun < 5s);
}

// Calls do not check tensors, so an error in `prepare` must prevent them.
TEST(a_program_is_prepared_again_after_an_error) {
  Ranks ranks;
  float at = 0;
  const auto prepare = [&](int64_t count) { return ranks.each([&, count](int r) { ranks.prepare(r, count); }); };
  const auto capture = [&] { return ranks.each([&](int r) { ranks.instances[r]->capture({{std::nullopt}}, {&at}, {&at}); }); };
  for (const std::string& error : prepare(kCount + 1)) EXPECT(error == "a wrong shape");
  for (const std::string& error : capture()) EXPECT_IN("not prepared", error);
  for (const std::string& error : prepare(kCount)) EXPECT(error.empty());
  for (const std::string& error : capture()) EXPECT(error.empty());
}

// Inputs are not copied between two calls, because such a copy could deadlock with copies of other ranks.
TEST(inputs_on_other_devices_are_fetched_before_the_first_call) {
  Ranks ranks;
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
  const auto calls_of = [&](int r) -> std::vector<hw::Staging::Call> {
    float* const first = r == 0 ? *x[1] : *y[r];  // Rank 0 overwrites the input of rank 1 for the second call.
    return {{{array_of(*x[r], 0)}, {array_of(first, r)}}, {{array_of(*x[r], 0)}, {array_of(*y[r], r)}}};
  };
  for (const std::string& error : ranks.each([&](int r) { ranks.staged[r]->place(calls_of(r)); })) EXPECT(error.empty());
  for (const std::string& error : ranks.each([&](int r) { ranks.instances[r]->run_staged({}, *ranks.staged[r], false); }))
    EXPECT(error.empty());
  for (int r = 0; r < kRanks; ++r) {
    OK(cudaSetDevice(r));
    const testing::Stream own;
    EXPECT(testing::fetch<float>(*y[r], kCount, own) == std::vector<float>(kCount, static_cast<float>((r + 2) % kRanks)));
  }
  OK(cudaSetDevice(0));
}

// Exit status of a process that exits while it creates a channel of `ranks` ranks. Only one of these ranks exists.
int status_after_a_channel(int ranks) {
  const pid_t child = fork();
  if (child == 0) {
    static const struct Destroyed {
      ~Destroyed() { _exit(7); }
    } destroyed;
    const std::atomic<bool> aborted = true;
    ncclUniqueId id;
    try {
      OK(ncclGetUniqueId(&id));
      hw::target::make_channel({.mesh = "mesh(x=2)", .axes = "x", .key = "x", .size = ranks}, id, 0, 10, aborted);
    } catch (const hw::ExecutionError&) {
    }
    hw::finish_background(ranks == 1 ? 60 : 0.5);  // A channel of one rank is always created.
    std::exit(3);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST(objects_that_a_waiting_thread_may_use_are_not_destroyed_at_the_exit) {
  testing::configure(testing::config_of(HW_CPU_PARALLEL, kRanks));
  hw::finish_background(60);  // A fork inherits the count of running threads of earlier tests, but not the threads.
  EXPECT(status_after_a_channel(1) == 7);
  EXPECT(status_after_a_channel(2) == 3);
}
