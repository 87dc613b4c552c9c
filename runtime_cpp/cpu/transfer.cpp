// Moves or reduces the data of a Match after all its ranks have arrived.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "communicator.h"

namespace hostweave::cpu {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;  // bytes that a worker processes at a time
constexpr std::size_t kAtOnce = 2048;                      // elements per step, so that the accumulators fit in the L1 cache

using Inputs = std::vector<const void*>;
using Outputs = std::vector<void*>;

// Reduces elements begin..end of all inputs. An output may be an input, because each step reads all inputs before it writes.
template <class T, class A, class Combine, class Finish>
void reduce_pieces(const Inputs& inputs, const Outputs& outputs, std::size_t begin, std::size_t end, Combine combine,
                   Finish finish) {
  std::array<A, kAtOnce> sums;
  for (std::size_t at = begin; at < end; at += kAtOnce) {
    const std::size_t n = std::min(kAtOnce, end - at);
    const T* first = static_cast<const T*>(inputs[0]) + at;
    for (std::size_t i = 0; i < n; ++i) sums[i] = static_cast<A>(first[i]);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + at;
      for (std::size_t i = 0; i < n; ++i) sums[i] = combine(sums[i], static_cast<A>(next[i]));
    }
    for (void* output : outputs) {
      T* to = static_cast<T*>(output) + at;
      for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<T>(finish(sums[i]));
    }
  }
}

// Narrow floats are reduced in f32. Sums and products of integers wrap around.
template <class T>
void reduce_as(ncclRedOp_t reduction, const Inputs& inputs, const Outputs& outputs, std::size_t begin, std::size_t end) {
  using A = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
  using Wrapping = std::conditional_t<std::is_integral_v<T>, std::uint64_t, A>;
  const auto reduce = [&](auto combine, auto finish) { reduce_pieces<T, A>(inputs, outputs, begin, end, combine, finish); };
  const auto same = [](A a) { return a; };
  const auto sum = [](A a, A b) { return static_cast<A>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b)); };
  switch (reduction) {
    case ncclSum:
      return reduce(sum, same);
    case ncclAvg:
      return reduce(
          sum, [ranks = static_cast<decltype(A{} + std::int64_t{})>(inputs.size())](A a) { return static_cast<A>(a / ranks); });
    case ncclProd:
      return reduce([](A a, A b) { return static_cast<A>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b)); }, same);
    // ncclMax and ncclMin propagate NaN.
    case ncclMax:
      return reduce([](A a, A b) { return a > b || a != a ? a : b; }, same);
    case ncclMin:
      return reduce([](A a, A b) { return a < b || a != a ? a : b; }, same);
    default:
      return;
  }
}

// Writes the reduction of all inputs to every output.
void reduce(const Match& match, const Inputs& inputs, const Outputs& outputs) {
  constexpr decltype(&reduce_as<float>) by_type[ncclNumTypes] = {
      reduce_as<std::int8_t>,  reduce_as<std::uint8_t>,  reduce_as<std::int32_t>,  reduce_as<std::uint32_t>,
      reduce_as<std::int64_t>, reduce_as<std::uint64_t>, reduce_as<__half>,        reduce_as<float>,
      reduce_as<double>,       reduce_as<__nv_bfloat16>, reduce_as<__nv_fp8_e4m3>, reduce_as<__nv_fp8_e5m2>,
  };
  Machine::get().split(match.count, kPieceBytes / type_size(match.type), [&](std::size_t begin, std::size_t end) {
    by_type[match.type](match.reduction, inputs, outputs, begin, end);
  });
}

const char* at(const void* base, std::size_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (to == from) return;
  Machine::get().split(bytes, kPieceBytes,
                       [=](std::size_t begin, std::size_t end) { std::memcpy(at(to, begin), at(from, begin), end - begin); });
}

void Match::transfer() {
  if (bytes() == 0) return;
  const int ranks = static_cast<int>(seats.size());
  Outputs outputs;  // outputs of one reduction
  for (int to = 0; to < ranks; ++to) {
    for (int from = 0; from < ranks && !reduces(); ++from) {
      const void* const sent = buffered ? buffer.data() : seats[from].send;
      if (data_flows(from, to)) copy_bytes(at(seats[to].recv, received_at(from)), sent, bytes());
    }
    if (!reduces() || !data_flows(to, to)) continue;
    outputs.push_back(seats[to].recv);
    if (kind == CommKind::all_reduce && to + 1 < ranks) continue;  // Reduces once, with all outputs.
    Inputs inputs;
    for (const Seat& seat : seats) inputs.push_back(at(seat.send, sent_at(to)));
    reduce(*this, inputs, std::exchange(outputs, {}));
  }
}

}  // namespace hostweave::cpu
