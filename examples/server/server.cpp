// Serves an MLP from two exported programs, one process per rank, without Python.
//
//   server WEIGHTS REQUESTS ANSWERS RANK RANKS ID_FILE     one process per rank; rank 0 writes ID_FILE, and the others read it
//   mpirun -n 2 server WEIGHTS REQUESTS ANSWERS            with -DSERVER_WITH_MPI=ON
//
// WEIGHTS is a folder with up.f32 and down.f32, REQUESTS a file of requests; all are f32 in C order. Rank 0 writes ANSWERS.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef SERVER_WITH_MPI
#include <mpi.h>
#endif

#include "hostweave/check.h"
#include "hostweave/device_memory.h"
#include "hostweave/world.h"
#include "programs/hidden/join.h"
#include "programs/hidden/program.h"
#include "programs/project/join.h"
#include "programs/project/program.h"

namespace {

constexpr int64_t kRows = 8, kWidth = 64, kHidden = 256;  // sizes of a request and of the weights

// --- the world ----------------------------------------------------------------------------------------------------

struct Place {
  int rank, ranks, device;
  ncclUniqueId id;
};

#ifdef SERVER_WITH_MPI
Place find_place(int argc, char** argv) {
  Place place{};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.ranks);
  MPI_Comm host;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &place.device);  // one GPU per process
  MPI_Comm_free(&host);
  if (place.rank == 0) HW_CHECK(ncclGetUniqueId(&place.id));
  MPI_Bcast(&place.id, sizeof place.id, MPI_BYTE, 0, MPI_COMM_WORLD);
  return place;
}
#else
// Rank 0 writes a temporary file and renames the file, so no rank reads a partial id. Each start of the server needs a new file.
Place find_place(int argc, char** argv) {
  if (argc != 7) throw std::invalid_argument("usage: server WEIGHTS REQUESTS ANSWERS RANK RANKS ID_FILE");
  const std::string path = argv[6];
  Place place{.rank = std::atoi(argv[4]), .ranks = std::atoi(argv[5]), .device = std::atoi(argv[4]), .id = {}};
  if (place.rank == 0) {
    HW_CHECK(ncclGetUniqueId(&place.id));
    std::ofstream(path + ".new", std::ios::binary).write(place.id.internal, sizeof place.id);
    std::filesystem::rename(path + ".new", path);
    return place;
  }
  for (int tries = 0; tries < 600; ++tries) {
    if (std::ifstream file(path, std::ios::binary); file.read(place.id.internal, sizeof place.id)) return place;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  throw std::runtime_error("rank 0 wrote no " + path + " in a minute");
}
#endif

// --- arrays -------------------------------------------------------------------------------------------------------

std::vector<float> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::vector<float> values(std::filesystem::file_size(path) / sizeof(float));
  file.read(reinterpret_cast<char*>(values.data()), std::streamsize(values.size() * sizeof(float)));
  return values;
}

// Block of a matrix for one rank.
std::vector<float> block(const std::vector<float>& matrix, int64_t columns, int64_t row, int64_t rows, int64_t column,
                         int64_t width) {
  std::vector<float> result;
  for (int64_t i = row; i < row + rows; ++i) {
    const auto begin = matrix.begin() + i * columns + column;
    result.insert(result.end(), begin, begin + width);
  }
  return result;
}

// An array in device memory.
struct Array {
  hw::DeviceMemory memory;
  hw::Tensor tensor{.dtype = CUDA_R_32F};

  Array(int device, hw::Shape shape) {
    tensor.shape = shape;
    tensor.device = device;
    tensor.data = memory.reserve(bytes());
  }
  Array(int device, hw::Shape shape, const std::vector<float>& values) : Array(device, shape) { set(values.data()); }
  size_t bytes() const { return size_t(tensor.shape[0] * tensor.shape[1]) * sizeof(float); }
  void set(const float* values) { HW_CHECK(cudaMemcpy(tensor.data, values, bytes(), cudaMemcpyHostToDevice)); }
};

// --- the server ---------------------------------------------------------------------------------------------------

struct Stream {
  cudaStream_t handle = nullptr;

  Stream() { HW_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
};

struct Event {
  cudaEvent_t handle = nullptr;

  Event() { HW_CHECK(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
};

// Captures both programs, which run on separate streams, in one CUDA graph.
class Server {
 public:
  Server(hw::World& world, const std::vector<float>& up, const std::vector<float>& down)
      : hidden_(programs::hidden::join(world)), project_(programs::project::join(world)) {
    const int device = world.rank().device();
    const int64_t rank = world.rank().index(), own = kHidden / world.rank().size();
    up_.emplace(device, hw::Shape{kWidth, own}, block(up, kHidden, 0, kWidth, rank * own, own));
    down_.emplace(device, hw::Shape{own, kWidth}, block(down, kWidth, rank * own, own, 0, kWidth));
    x_.emplace(device, hw::Shape{kRows, kWidth});

    const auto shapes = hidden_.prepare({.x = x_->tensor, .up = up_->tensor});  // before the first run
    h_.emplace(device, shapes.y);
    y_.emplace(device, project_.prepare({.h = h_->tensor, .down = down_->tensor}).y);
    // This collective waits until all ranks have prepared both programs.
    world.join("prepared", "", hw::Transport::two_sided, hw::World::kNone, 0, world.rank().size());
    run();  // warm-up before the capture
    HW_CHECK(cudaStreamSynchronize(first_));

    cudaGraph_t graph;
    HW_CHECK(cudaStreamBeginCapture(first_, cudaStreamCaptureModeThreadLocal));
    run();
    HW_CHECK(cudaStreamEndCapture(first_, &graph));
    HW_CHECK(cudaGraphInstantiateWithFlags(&graph_, graph, 0));
    HW_CHECK(cudaGraphDestroy(graph));
  }
  ~Server() { cudaGraphExecDestroy(graph_); }

  // Returns the answer to a request, in device memory. The answer is valid until the next request.
  const Array& answer(const float* request) {
    x_->set(request);
    HW_CHECK(cudaGraphLaunch(graph_, first_));
    HW_CHECK(cudaStreamSynchronize(first_));
    return *y_;
  }

  // Runs with a number of rows that was not prepared: the program reports an error and writes nothing.
  void expect_a_refusal() {
    hw::Tensor larger = x_->tensor;
    larger.shape.dims[0] += 1;
    try {
      hidden_.run({.x = larger, .up = up_->tensor}, {.y = h_->tensor}, first_);
    } catch (const hw::ExecutionError& error) {
      std::printf("refused as expected: %s\n", error.what());
      return;
    }
    throw std::logic_error("a run with sizes that were not prepared went on");
  }

 private:
  void run() {
    hidden_.run({.x = x_->tensor, .up = up_->tensor}, {.y = h_->tensor}, first_);
    HW_CHECK(cudaEventRecord(between_, first_));
    HW_CHECK(cudaStreamWaitEvent(second_, between_));
    project_.run({.h = h_->tensor, .down = down_->tensor}, {.y = y_->tensor}, second_);
    HW_CHECK(cudaEventRecord(done_, second_));
    HW_CHECK(cudaStreamWaitEvent(first_, done_));
  }

  programs::hidden::Program hidden_;
  programs::project::Program project_;
  std::optional<Array> up_, down_, x_, h_, y_;
  Stream first_, second_;
  Event between_, done_;
  cudaGraphExec_t graph_ = nullptr;
};

void serve(int argc, char** argv) {
  hw::use_processes();
  const Place place = find_place(argc, argv);
#ifdef HOSTWEAVE_CPU_DEVICE
  const int device = 0;  // each process simulates one device
#else
  const int device = place.device;
#endif
  hw::World world(place.id, device, place.rank, place.ranks);
  const std::string weights = argv[1];
  Server server(world, read(weights + "/up.f32"), read(weights + "/down.f32"));
  if (place.rank == 0) server.expect_a_refusal();

  const std::vector<float> requests = read(argv[2]);
  std::vector<float> answers(requests.size());
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i + kRows * kWidth <= requests.size();
       i += kRows * kWidth) {  // a real server would broadcast requests from a queue
    const Array& answer = server.answer(&requests[i]);
    HW_CHECK(cudaMemcpy(&answers[i], answer.tensor.data, answer.bytes(), cudaMemcpyDeviceToHost));
  }
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
  if (place.rank == 0) {
    std::ofstream(argv[3], std::ios::binary)
        .write(reinterpret_cast<char*>(answers.data()), std::streamsize(answers.size() * sizeof(float)));
    std::printf("%zu requests in %.1f ms\n", requests.size() / size_t(kRows * kWidth), ms.count());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    serve(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
#ifdef SERVER_WITH_MPI
  MPI_Finalize();
#endif
}
