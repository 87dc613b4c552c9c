// Runs ag_matmul_p2p in many schedules. Each run makes three consecutive calls, without synchronisation between them. The
// caller's stream writes the inputs and reads the outputs.
//   ag_matmul parallel|uniform|pct|hosts|mixed FIRST_SEED SEEDS [key=value ...]
// keys: ranks; fork, join (index of a stream that lacks this wait), next (1: matmuls on the next stream); ordered,
// buffered, check (of hw_cpu_config)
// Prints the numbers of right, wrong and reported runs, and whether the last seed gave the same schedule twice. Then prints the
// mean time of an op in microseconds, and the last report.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "ag_matmul_p2p/program.h"

namespace {

using ag_matmul::D;
constexpr int64_t kRows = 4, K = 8, N = 6;
int64_t M;  // kRows * D
constexpr int kCalls = 3;

struct Case {
  std::vector<float> x, w, y;
};

Case make_case(std::uint64_t seed) {  // small integers, which are exact in bf16
  std::mt19937_64 random(seed);
  Case c{std::vector<float>(M * K), std::vector<float>(K * N), std::vector<float>(M * N)};
  for (auto* v : {&c.x, &c.w})
    for (float& e : *v) e = static_cast<float>(random() % 7) - 3;
  for (int64_t i = 0; i < M; ++i)
    for (int64_t j = 0; j < N; ++j)
      for (int64_t k = 0; k < K; ++k) c.y[i * N + j] += c.x[i * K + k] * c.w[k * N + j];
  return c;
}

struct Produce {
  const float* from;
  hw::bf16* to;
  int64_t count;
};
struct Compare {
  const hw::bf16* got;
  const float* want;
  int64_t count;
  std::atomic<int>* wrong;
};

void produce(const float* from, hw::bf16* to, int64_t count, cudaStream_t stream) {
  const Produce closure{from, to, count};
  const hw_cpu_range ranges[] = {{to, count * sizeof(hw::bf16), 1, 0, 1}};
  const auto run = [](void* c) {
    auto& [from, to, count] = *static_cast<Produce*>(c);
    for (int64_t i = 0; i < count; ++i) to[i] = __float2bfloat16(from[i]);
  };
  HW_CHECK(hw_cpu_launch("produce", stream, run, &closure, sizeof closure, ranges, 1));
}

void compare(const hw::bf16* got, const float* want, int64_t count, std::atomic<int>* wrong, cudaStream_t stream) {
  const Compare closure{got, want, count, wrong};
  const hw_cpu_range ranges[] = {{got, count * sizeof(hw::bf16), 1, 0, 0}};
  const auto run = [](void* c) {
    auto& [got, want, count, wrong] = *static_cast<Compare*>(c);
    for (int64_t i = 0; i < count; ++i)
      if (!(__bfloat162float(got[i]) == want[i])) return void(++*wrong);
  };
  HW_CHECK(hw_cpu_launch("compare", stream, run, &closure, sizeof closure, ranges, 1));
}

void rank_main(int r, const ncclUniqueId& id, const std::vector<Case>& cases, std::atomic<int>& wrong) {
  HW_CHECK(cudaSetDevice(r));
  ncclComm_t comm;
  HW_CHECK(ncclCommInitRank(&comm, D, id, r));
  {
    hw::Rank rank(comm, r, D);
    ag_matmul::Program program(rank);
    cudaStream_t caller;
    HW_CHECK(cudaStreamCreateWithFlags(&caller, cudaStreamNonBlocking));
    hw::bf16 *x, *w, *y;
    HW_CHECK(cudaMalloc(&x, kRows * K * 2));
    HW_CHECK(cudaMalloc(&w, K * N * 2));
    HW_CHECK(cudaMalloc(&y, M * N * 2));
    const ag_matmul::Inputs in{{x, CUDA_R_16BF, {kRows, K}}, {w, CUDA_R_16BF, {K, N}}};
    const ag_matmul::Outputs out{{y, CUDA_R_16BF, {M, N}}};
    program.prepare(in);
    HW_CHECK(static_cast<cudaError_t>(hw_cpu_barrier(D) ? cudaErrorUnknown : cudaSuccess));
    for (const Case& c : cases) {
      HW_CHECK(cudaMemsetAsync(y, 0xff, M * N * 2, caller));
      produce(c.x.data() + r * kRows * K, x, kRows * K, caller);
      produce(c.w.data(), w, K * N, caller);
      program.run(in, out, caller);
      compare(y, c.y.data(), M * N, &wrong, caller);
      HW_CHECK(cudaMemsetAsync(x, 0xff, kRows * K * 2, caller));
    }
    HW_CHECK(cudaStreamSynchronize(caller));
    for (hw::bf16* p : {x, w, y}) HW_CHECK(cudaFree(p));
    HW_CHECK(cudaStreamDestroy(caller));
  }
  HW_CHECK(ncclCommDestroy(comm));
}

enum class Outcome { right, wrong, reported };

Outcome run_once(hw_cpu_config config, std::uint64_t seed, hw_cpu_counters& counters, std::string& report) {
  config.seed = seed;
  if (hw_cpu_configure(&config) != 0) std::printf("configure: %s\n", hw_cpu_last_report()), std::exit(2);
  std::vector<Case> cases;
  for (int i = 0; i < kCalls; ++i) cases.push_back(make_case(seed * kCalls + i));
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> ranks;
  for (int r = 0; r < D; ++r) {
    ranks.emplace_back([&, r] {
      hw_cpu_attach(r);
      try {
        rank_main(r, id, cases, wrong);
      } catch (const std::exception& e) {
        hw_cpu_abort(e.what());
      }
      hw_cpu_detach();
    });
  }
  for (auto& t : ranks) t.join();
  hw_cpu_get_counters(&counters);
  if (hw_cpu_failed()) {
    report = hw_cpu_last_report();
    return Outcome::reported;
  }
  if (counters.live_bytes || counters.live_streams || counters.live_events || counters.live_communicators) {
    std::printf("left behind: %zu bytes, %zu streams, %zu events, %zu communicators\n", size_t(counters.live_bytes),
                size_t(counters.live_streams), size_t(counters.live_events), size_t(counters.live_communicators));
    std::exit(2);
  }
  return wrong ? Outcome::wrong : Outcome::right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string mode = argv[1];
  hw_cpu_config config;
  config.timeout_seconds = 20;
  config.mode = mode == "parallel" ? HW_CPU_PARALLEL : HW_CPU_SEEDED;
  config.picker = mode == "uniform" ? HW_CPU_UNIFORM : mode == "pct" ? HW_CPU_PCT : mode == "hosts" ? HW_CPU_HOSTS : HW_CPU_MIXED;
  for (int i = 4; i < argc; ++i) {
    const std::string option = argv[i];
    const auto equals = option.find('=');
    const std::string key = option.substr(0, equals);
    const int value = std::atoi(option.c_str() + equals + 1);
    if (key == "ranks") D = value;
    if (key == "fork") hw::sabotage.fork = value;
    if (key == "join") hw::sabotage.join = value;
    if (key == "next") hw::sabotage.matmul_on_next_stream = value;
    if (key == "ordered") config.ordered_launches = value;
    if (key == "buffered") config.buffered_sends = value;
    if (key == "check") config.check_dependencies = value;
  }
  config.devices = D;
  M = kRows * D;
  const std::uint64_t first = std::strtoull(argv[2], nullptr, 10), count = std::strtoull(argv[3], nullptr, 10);
  int outcomes[3] = {};
  std::uint64_t ops = 0;
  std::string report;
  hw_cpu_counters counters{}, again{};
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    ++outcomes[static_cast<int>(run_once(config, seed, counters, report))];
    ops += counters.ops;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  run_once(config, first + count - 1, again, report);
  const bool same = again.schedule == counters.schedule && again.steps == counters.steps;
  std::printf("right %d wrong %d reported %d same_schedule %d us_an_op %.2f\n", outcomes[0], outcomes[1], outcomes[2], same,
              seconds * 1e6 / static_cast<double>(std::max<std::uint64_t>(ops, 1)));
  if (!report.empty()) std::printf("%s\n", report.c_str());
}
