#include "hostweave/sample.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "hostweave/index.h"
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
      throw std::invalid_argument(argument + ": write NAME=NUMBER, with a number of at least 1; --help lists the names");
    const auto named = [&](const Setting& setting) { return argument.substr(0, equals) == setting.name; };
    const auto found = std::ranges::find_if(settings, named);
    if (found == settings.end()) throw std::invalid_argument(argument + ": there is no such setting; --help lists them");
    *found->value = value;
  }
}

void run_ranks(int count, const std::function<void(int)>& rank) {
  std::vector<std::jthread> threads;
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
}

Block::Block(Part part, std::initializer_list<Dim> dims) {
  for (const Dim& dim : dims) {
    const bool is_local = part == Part::kLocal;
    const int i = shape_.ndim;
    shape_.ndim = global_.ndim = begin_.ndim = shift_.ndim = i + 1;
    global_.dims[i] = dim.size;
    shape_.dims[i] = is_local ? local_size(dim.size, dim.shards, dim.index) : dim.size;
    const bool is_zigzag = is_local && dim.zigzag && dim.shards > 1;
    begin_.dims[i] = is_local ? dim.index * ceil_div(dim.size, dim.shards * (is_zigzag ? 2 : 1)) : 0;
    shift_.dims[i] = is_zigzag ? (dim.shards - 1 - dim.index) * shape_.dims[i] : 0;
  }
}

int64_t Block::count() const { return std::accumulate(shape_.dims, shape_.dims + shape_.ndim, int64_t{1}, std::multiplies<>()); }

void Block::each(const std::function<void(int64_t, int64_t)>& visit) const {
  const auto index = [&](int dim, int64_t i) { return begin_[dim] + i + (2 * i < shape_[dim] ? 0 : shift_[dim]); };
  for (int64_t element = 0, elements = count(); element < elements; ++element) {
    int64_t global = 0, stride = 1, rest = element;
    for (int i = shape_.ndim; i-- > 0; stride *= global_[i], rest /= shape_[i]) global += index(i, rest % shape_[i]) * stride;
    visit(element, global);
  }
}

DeviceTensor::DeviceTensor(const Element& element, const Name& name, cudaDataType_t dtype, Part part,
                           std::initializer_list<Dim> dims, int twin, bool is_here)
    : element_(element), name_(name), block_(part, dims), twin_(twin), is_here_(is_here) {
  tensor_ = {.dtype = dtype, .shape = block_.shape(), .global_shape = block_.global()};
  HW_CHECK(cudaGetDevice(&tensor_.device));
  tensor_.data = memory_.reserve(bytes());
}

void DeviceTensor::randomize(uint64_t seed) {
  Bytes values(bytes());
  block_.each([&](int64_t i, int64_t global) {  // SplitMix64 (Steele, Lea and Flood 2014)
    uint64_t bits = ((seed << 40) + global + 1) * 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    element_.set(values.data(), i, int(bits >> 61));
  });
  HW_CHECK(cudaMemcpy(tensor_.data, values.data(), bytes(), cudaMemcpyHostToDevice));
}

void DeviceTensor::fill_bytes(int value) const { HW_CHECK(cudaMemset(tensor_.data, value, bytes())); }

Bytes DeviceTensor::to_host() const {
  Bytes result(bytes());
  HW_CHECK(cudaMemcpy(result.data(), tensor_.data, bytes(), cudaMemcpyDeviceToHost));
  return result;
}

void DeviceTensor::expect_same(const Bytes& before, const Bytes& of_twin) const {
  if (!is_here_) return;
  const char* const wrong = to_host() != before ? "two calls differ, or leave elements unwritten"
                            : before != of_twin ? "differs between ranks"
                                                : nullptr;
  if (wrong) throw std::runtime_error(text_of(name_) + ": " + wrong);
}

void DeviceTensor::expect_close(const Bytes& reference, const Tolerance& tolerance) const {
  if (!is_here_) return;
  double greatest = 0;
  block_.each([&](int64_t, int64_t global) {
    const double expected = element_.get(reference.data(), global);
    if (std::isfinite(expected)) greatest = std::max(greatest, std::abs(expected));
  });
  const int64_t roundoffs = element_.is_integral ? 0 : tolerance.roundoffs;
  const double allowed = roundoffs * tolerance.unit * greatest;
  const Bytes own = to_host();
  block_.each([&](int64_t i, int64_t global) {
    const double computed = element_.get(own.data(), i), expected = element_.get(reference.data(), global);
    if (computed == expected || (std::isnan(computed) && std::isnan(expected)) || std::abs(computed - expected) <= allowed)
      return;
    std::ostringstream what;
    what << text_of(name_) << ": element " << i << " of this rank's block is " << computed << ", and " << expected
         << " in the reference";
    if (roundoffs) {
      what << ": they differ by " << std::abs(computed - expected) / (tolerance.unit * greatest)
           << " roundoffs of the greatest value, and " << roundoffs << " are allowed; roundoffs=NUMBER allows more";
    }
    throw std::runtime_error(what.str());
  });
}

void Tensors::randomize_inputs() {
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i].randomize(i);
}

std::vector<Bytes> Tensors::outputs_to_host() const {
  std::vector<Bytes> all;
  for (const DeviceTensor& output : outputs) all.push_back(output.to_host());
  return all;
}

Times measure(const std::function<void()>& call, cudaStream_t stream, std::barrier<>& meet, int64_t repetitions) {
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  std::vector<double> device_ms, enqueue_us;
  const auto median = [](std::vector<double>& values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  };
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
