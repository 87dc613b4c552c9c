#include "hostweave/sample.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <thread>

#include "hostweave/streams.h"

namespace hw::sample {

void read(int argc, char** argv, const std::vector<Setting>& settings) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      std::printf("usage: %s [NAME=NUMBER]...\n", argv[0]);
      for (const Setting& setting : settings) std::printf("  %s=%lld\n", setting.name, static_cast<long long>(*setting.value));
      std::exit(0);
    }
    const size_t equals = argument.find('=');
    int64_t value = 0;
    const char* end = argv[i] + argument.size();
    const bool is_number = equals != std::string::npos && std::from_chars(argv[i] + equals + 1, end, value).ptr == end;
    if (!is_number || value < 1)
      throw std::invalid_argument(argument + ": write NAME=NUMBER, of at least 1; --help says the names");
    const auto named = [&](const Setting& setting) { return argument.substr(0, equals) == setting.name; };
    const auto found = std::ranges::find_if(settings, named);
    if (found == settings.end()) throw std::invalid_argument(argument + ": there is no such setting; --help says those that are");
    *found->value = value;
  }
}

void use_devices(int count) {
#ifdef HOSTWEAVE_CPU_DEVICE
  hw_cpu_config config;
  hw_cpu_default_config(&config);
  config.devices = count;
  expect(hw_cpu_configure(&config) == 0, hw_cpu_last_report());
#endif
  int devices = 0;
  HW_CHECK(cudaGetDeviceCount(&devices));
  expect(devices >= count, "needs " + std::to_string(count) + " devices, and there are " + std::to_string(devices));
}

void run_ranks(int count, const std::function<void(int)>& rank) {
  std::vector<std::thread> threads;
  for (int r = 0; r < count; ++r) {
    threads.emplace_back([r, &rank] {
      try {
        HW_CHECK(cudaSetDevice(r));
        rank(r);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", r, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

Communicators::Communicators(const ncclUniqueId& id, int rank, int count) {
  HW_CHECK(ncclCommInitRank(&comms_.emplace_back(), count, id, rank));
}

Communicators::~Communicators() {
  for (ncclComm_t comm : comms_) ncclCommDestroy(comm);
}

Channel Communicators::channel(int color, int place, int64_t size) {
  ncclComm_t comm;
  HW_CHECK(ncclCommSplit(comms_.front(), color, place, &comm, nullptr));
  comms_.push_back(comm);
  return {comm, place, size};
}

void Communicators::no_channel() {
  ncclComm_t comm;
  HW_CHECK(ncclCommSplit(comms_.front(), NCCL_SPLIT_NOCOLOR, 0, &comm, nullptr));
}

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

Times measure(const std::function<void()>& call, cudaStream_t stream, std::barrier<>& meet, int64_t repetitions) {
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  std::vector<double> device_ms, enqueue_us;
  for (int64_t i = 0; i < repetitions; ++i) {
    meet.arrive_and_wait();
    HW_CHECK(cudaEventRecord(begin, stream));
    const auto start = std::chrono::steady_clock::now();
    call();
    enqueue_us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    HW_CHECK(cudaEventRecord(end, stream));
    HW_CHECK(cudaEventSynchronize(end));
    float elapsed;
    HW_CHECK(cudaEventElapsedTime(&elapsed, begin, end));
    device_ms.push_back(elapsed);
  }
  return {median(device_ms), median(enqueue_us)};
}

}  // namespace hw::sample
