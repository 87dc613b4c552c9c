// Minimal test framework that compiles fast.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <hostweave_cpu.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::map<std::string, std::function<void()>>& tests() {
  static std::map<std::string, std::function<void()>> all;
  return all;
}
struct Register {
  Register(const std::string& file, const std::string& name, std::function<void()> body) {
    const size_t begin = file.rfind('/') + 1;
    tests().emplace(file.substr(begin, file.rfind('.') - begin) + " " + name, std::move(body));
  }
};
// Registers a test as `FILE NAME`.
#define TEST(name)                                                       \
  static void name();                                                    \
  static const testing::Register register_##name(__FILE__, #name, name); \
  static void name()

inline std::string where(int line, const std::string& text) { return "line " + std::to_string(line) + ": " + text; }
#define EXPECT(condition) \
  ((condition) ? void() : throw testing::Failure(testing::where(__LINE__, std::string(#condition) + "; " + hw_cpu_last_report())))
#define EXPECT_IN(part, text)                        \
  (std::string(text).find(part) != std::string::npos \
       ? void()                                      \
       : throw testing::Failure(testing::where(__LINE__, std::string("no \"") + (part) + "\" in: " + (text))))
#define OK(call) (hw_cpu_location(__FILE__, __LINE__, #call), testing::ok(call, __LINE__, #call))

inline void ok(int code, int line, const char* call) {
  if (code != 0) throw Failure(where(line, std::string(call) + " gave " + std::to_string(code) + "; " + hw_cpu_last_report()));
}

inline hw_cpu_config config_of(int mode, int devices, std::uint64_t seed = 0) {
  hw_cpu_config config;
  config.mode = mode;
  config.devices = devices;
  config.seed = seed;
  config.timeout_seconds = 10;
  return config;
}
inline void configure(const hw_cpu_config& config) { ok(hw_cpu_configure(&config), 0, "hw_cpu_configure"); }

// Runs one attached thread per rank. An exception in one thread stops the other threads. Returns the message of the lowest rank
// that failed, or "".
inline std::string run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      hw_cpu_attach(r);
      try {
        body(r);
      } catch (const std::exception& e) {
        errors[r] = e.what();
        hw_cpu_abort(e.what());
      }
      hw_cpu_detach();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (!error.empty()) return error;
  return "";
}

// Runs `body` in parallel mode, and in seeded mode with several seeds.
inline void in_every_mode(int devices, const std::function<void()>& body, int seeds = 12) {
  configure(config_of(HW_CPU_PARALLEL, devices));
  body();
  for (int seed = 0; seed < seeds; ++seed) {
    configure(config_of(HW_CPU_SEEDED, devices, seed));
    body();
  }
}
inline void on_ranks(int ranks, const std::function<void(int)>& body) {
  in_every_mode(ranks, [&] {
    const std::string error = run_ranks(ranks, body);
    if (!error.empty()) throw Failure(error);
  });
}

// A kernel that writes count floats.
inline cudaError_t set(float* to, float value, int count, cudaStream_t stream) {
  struct Closure {
    float* to;
    float value;
    int count;
  } closure{to, value, count};
  const hw_cpu_range range{to, count * sizeof(float), 1, 0, 1};
  return hw_cpu_launch(
      "set", stream,
      [](void* c) {
        const auto& [to, value, count] = *static_cast<Closure*>(c);
        for (int i = 0; i < count; ++i) to[i] = value;
      },
      &closure, sizeof closure, &range, 1);
}

struct Stream {
  explicit Stream(unsigned flags = cudaStreamNonBlocking) { OK(cudaStreamCreateWithFlags(&handle, flags)); }
  ~Stream() { cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
  cudaStream_t handle;
};
struct Event {
  Event() { OK(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
  cudaEvent_t handle;
};
template <class T = float>
struct Buffer {
  explicit Buffer(std::size_t count) { OK(cudaMalloc(&data, count * sizeof(T))); }
  ~Buffer() { cudaFree(data); }
  operator T*() const { return data; }
  T* data = nullptr;
};
template <class T>
std::vector<T> fetch(const T* from, std::size_t count, cudaStream_t stream) {
  std::vector<T> to(count);
  OK(cudaMemcpyAsync(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
  OK(cudaStreamSynchronize(stream));
  return to;
}

struct Comm {
  Comm(const ncclUniqueId& id, int size, int rank) { OK(ncclCommInitRank(&handle, size, id, rank)); }
  ~Comm() { ncclCommDestroy(handle); }
  operator ncclComm_t() const { return handle; }
  ncclComm_t handle;
};

inline int main(int argc, char** argv) {
  int failed = 0;
  for (const auto& [name, body] : tests()) {
    if (argc > 1 && !name.starts_with(argv[1])) continue;
    try {
      body();
      std::printf("ok %s\n", name.c_str());
    } catch (const std::exception& e) {
      std::printf("FAILED %s: %s\n", name.c_str(), e.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed != 0;
}

}  // namespace testing
